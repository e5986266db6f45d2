"""The retrieval head as a function of tensors, and as a graph that artifacts keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from semkv.ir.graph import finish, placeholders
from semkv.profiles.schema.retrieval_head import PREFIX, RetrievalHead, RetrievalHeadSection, rotary_frequencies

EMBEDDING = "embedding"
FREQUENCIES = "frequencies"
INPUTS = ("input_ids", "positions")
FEATURES = "features"
Lookup = Callable[[Tensor, Tensor], Tensor]
"""Of ids [B, T] in a table [vocab, H]: their rows [B, T, H]."""


def queries_and_keys(
    section: RetrievalHeadSection,
    weights: Mapping[str, Tensor],
    ids: Tensor,
    positions: Tensor,
    features: Tensor | None = None,
    rows: Tensor | None = None,
    lookup: Lookup = torch.nn.functional.embedding,
) -> tuple[Tensor, Tensor]:
    """What the head asks and holds for tokens: queries float32 [B, Hq, T, D], scaled so that q.k is a logit, and keys
    float32 [B, Hkv, T, D]. rows int64 [r]: the tokens whose queries are wanted, None for all.

    ids, positions [B, T]; features [B, T, F] of the token before each, zeros before the first. weights: the section's tensors
    without its prefix, the model's `embedding` [vocab, H] and `frequencies` [D / 2]. lookup: how ids find their rows there.
    """
    own = lookup(ids, weights[EMBEDDING]).float()
    parts = [_normalised(own, section.epsilon) * weights["input_norm"].float()]
    if features is not None:
        given = features.float()
        if section.projected:
            given = given @ weights["projection"].float().T
        parts.append(_normalised(given, section.epsilon) * weights["feature_norm"].float())
    inputs = torch.cat(parts, -1)
    angle = positions[:, None, :, None].float() * weights[FREQUENCIES]
    scale = section.head_dim**-0.5 * rotary_frequencies(section)[1]

    def heads(weight: Tensor, inputs: Tensor, angle: Tensor) -> Tensor:
        projected = (inputs @ weight.float().T).unflatten(-1, (-1, section.head_dim)).transpose(1, 2)
        return _turned(projected, angle.cos(), angle.sin())

    asking = (inputs, angle) if rows is None else (inputs[:, rows], angle[:, :, rows])
    return heads(weights["query"], *asking) * scale, heads(weights["key"], inputs, angle)


def _normalised(x: Tensor, epsilon: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: dimension i with i + D/2."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def head_graph(
    head: RetrievalHead, embedding: Tensor, embedding_name: str, lookup: Lookup = torch.nn.functional.embedding
) -> GraphModule:
    """`queries_and_keys` as a graph of `input_ids`, `positions` and, where the head reads them, `features`.

    The model's `embedding` keeps its name and storage; the head's own tensors are on its device.
    """
    section = head.section
    weights = {name: tensor.to(embedding.device) for name, tensor in head.tensors.items()}
    weights[FREQUENCIES] = rotary_frequencies(section)[0].to(embedding.device)
    names = [EMBEDDING, *weights]
    given = [torch.zeros(2, 3, dtype=torch.int64, device=embedding.device) for _ in INPUTS]
    given += (
        [torch.zeros(2, 3, section.features, dtype=torch.float32, device=embedding.device)] if section.features else []
    )
    inputs = [*INPUTS, *([FEATURES] if section.features else [])]

    def whole(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        ids, positions, *features = tensors[len(names) :]
        given = features[0] if features else None
        return queries_and_keys(section, dict(zip(names, tensors)), ids, positions, given, lookup=lookup)

    traced = make_fx(whole, tracing_mode="symbolic")(embedding, *weights.values(), *given)
    found = list(placeholders(traced.graph).values())
    for node, name in zip(found, names):
        target = embedding_name if name == EMBEDDING else f"{PREFIX}{name}"
        _register(traced, target, embedding if name == EMBEDDING else weights[name])
        with traced.graph.inserting_before(node):
            stored = traced.graph.get_attr(target)
        stored.meta = dict(node.meta)
        node.replace_all_uses_with(stored)
        traced.graph.erase_node(node)
    for node, name in zip(found[len(names) :], inputs):
        node.target = node.name = name
    return finish(GraphModule(traced, traced.graph, class_name="RetrievalHead"))


def _register(root: torch.nn.Module, target: str, tensor: Tensor) -> None:
    """Put `tensor` where a `get_attr` node with this target looks for it."""
    *path, name = target.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, torch.nn.Module())
        root = getattr(root, part)
    if isinstance(tensor, torch.nn.Parameter):
        root.register_parameter(name, tensor)
    else:
        root.register_buffer(name, tensor)
