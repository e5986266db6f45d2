"""`torch.compile(model, backend="semkv", dynamic=True)`: the passes that find attention, for stateless forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from semkv import kernels  # noqa: F401 - registers the operators
from semkv.capture.export import capture
from semkv.compiler.pipeline import run_passes
from semkv.errors import CaptureError, ConfigError
from semkv.ir.graph import copy_graph_module
from semkv.passes.base import PassOptions
from semkv.passes.canonicalise import Canonicalise
from semkv.passes.find_attention import FindAttention
from semkv.passes.pin_defaults import PinDefaults

INTEGERS = (torch.int64, torch.int32)
HELD = "held_"
"""Prefix of the names under which the graph's weights hang on the module that is captured again."""


def semkv(
    gm: GraphModule, example_inputs: Sequence[Any], options: dict[str, Any] | None = None
) -> Callable[..., tuple[Tensor]]:
    """A Dynamo backend: the graph with each attention as one `semkv::attention` operator, differentiable and exact.

    It serves forwards from token ids [B, T], and position ids where they are given, to logits [B, T, vocab], without a cache
    (`use_cache=False`) and without a padding mask. For generation on a compressed memory use `semkv.compile`.

    Parameters
    ----------
    gm: what Dynamo traced, with a dynamic length (`torch.compile(..., dynamic=True)`).
    example_inputs: its inputs.
    options: none are known; given ones are refused.

    Raises
    ------
    ConfigError: options. CaptureError: inputs other than ids and positions, a length that is fixed, or no attention.
    """
    if options:
        raise ConfigError(f"backend 'semkv' has no option {next(iter(options))!r} (it has none)")
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    roles = _roles(inputs, example_inputs)
    ids_at = roles.index("ids")
    positions_at = roles.index("positions") if "positions" in roles else None

    floats = [place for place, role in enumerate(roles) if role == "float"]
    variants: dict[tuple[float, ...], tuple[GraphModule, list[int]]] = {}

    def variant(arguments: Sequence[Any]) -> tuple[GraphModule, list[int]]:
        """The rewritten graph for these numbers of the model: Dynamo passes floats as tensors and does not guard them."""
        values = tuple(float(arguments[place]) for place in floats)
        if values not in variants:
            source = _Regrounded(_with_floats(gm, dict(zip(floats, values))), roles, arguments)
            with torch._guards.tracing(None):  # a trace of its own: else its sizes become guards of Dynamo's
                program = run_passes(
                    capture(source, within_dynamo=True), (Canonicalise(), PinDefaults(), FindAttention()), PassOptions()
                )
            variants[values] = _with_weights_as_inputs(program.body)
        return variants[values]

    variant(example_inputs)

    def run(*arguments: Any) -> tuple[Tensor]:
        body, weights = variant(arguments)
        ids = arguments[ids_at]
        if positions_at is None:
            positions = torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device).expand(ids.shape)
        else:
            positions = arguments[positions_at].expand(ids.shape)
        return (body(ids, positions, *(arguments[place] for place in weights)),)

    return run


def _roles(inputs: list[Node], examples: Sequence[Any]) -> list[str]:
    """What each input of the graph is: `ids`, `positions`, `size:0`, `size:1`, `float`, `unread` or `weight`."""
    roles: list[str] = []
    shape: torch.Size | None = None
    symbols: list[tuple[int, str]] = []
    for place, (node, example) in enumerate(zip(inputs, examples, strict=True)):
        value = node.meta.get("example_value", example)
        if isinstance(value, torch.SymInt) and not node.users:
            roles.append("unread")  # the stride of ids that are a part of others, for example
        elif isinstance(value, (int, torch.SymInt)):
            symbols.append((place, str(value)))
            roles.append("size")
        elif node.users and all(user.op == "call_method" and user.target == "item" for user in node.users):
            roles.append("float")
        elif isinstance(example, nn.Parameter) or not isinstance(value, Tensor) or value.dtype.is_floating_point:
            roles.append("weight")
        elif value.dtype in INTEGERS and value.dim() == 2 and _is_given(node):
            shape = value.shape if shape is None else shape
            roles.append("positions" if "ids" in roles else "ids")
        elif _is_given(node):
            raise CaptureError(
                f"backend 'semkv': the forward reads {node.name}, {value.dtype} {tuple(value.shape)}; expected token ids and "
                "position ids [B, T] only: pass no padding mask and use_cache=False"
            )
        else:
            roles.append("weight")
    if shape is None:
        raise CaptureError(
            "backend 'semkv': no token ids [B, T] among the inputs of the graph; expected a decoder's whole forward"
        )
    if roles.count("positions") > 1:
        raise CaptureError("backend 'semkv': more than two integer inputs [B, T]; pass token ids and position ids only")
    sizes = [str(size) for size in shape]
    for place, symbol in symbols:
        if symbol not in sizes:
            raise CaptureError(
                f"backend 'semkv': the graph reads a size {symbol} that is none of the ids' {tuple(sizes)}"
            )
        roles[place] = f"size:{sizes.index(symbol)}"
    if not isinstance(shape[1], torch.SymInt):
        instead = (
            "call it with prompts of at least two tokens first, as one token is always fixed"
            if shape[1] == 1
            else "call torch.compile(..., backend='semkv', dynamic=True)"
        )
        raise CaptureError(
            f"backend 'semkv': Dynamo fixed the length at {shape[1]} tokens, and what a mask means is read at several lengths; {instead}"
        )
    return roles


def _is_given(node: Node) -> bool:
    """Whether the input is an argument of the call, not a tensor of the model: Dynamo names those after `self`."""
    return "_self_" not in node.name.lower()


def _with_floats(gm: GraphModule, values: dict[int, float]) -> GraphModule:
    """A copy of the graph in which the inputs at these places are constants."""
    module = copy_graph_module(gm)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for place, value in values.items():
        for user in list(inputs[place].users):
            user.replace_all_uses_with(value)
            module.graph.erase_node(user)
    module.recompile()
    return module


class _Regrounded(nn.Module):
    """Dynamo's graph as a model from ids and positions to logits; its weights are the inputs' own tensors."""

    def __init__(self, gm: GraphModule, roles: list[str], examples: Sequence[Any]) -> None:
        super().__init__()
        self.gm, self.roles = gm, roles
        for place, (role, example) in enumerate(zip(roles, examples)):
            if role == "weight" and isinstance(example, nn.Parameter):
                self.register_parameter(f"{HELD}{place}", example)
            elif role == "weight":
                self.register_buffer(f"{HELD}{place}", example)
        self.eval()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        given: dict[str, Any] = {"ids": input_ids, "positions": position_ids, "float": None, "unread": None}
        given |= {f"size:{axis}": size for axis, size in enumerate(input_ids.shape)}
        result = self.gm.forward(  # a call of it prints errors, also those of trials at sizes that do not fit
            *(getattr(self, f"{HELD}{n}") if role == "weight" else given[role] for n, role in enumerate(self.roles))
        )
        if not isinstance(result, (tuple, list)):
            return result
        if len(result) != 1:
            raise CaptureError(
                f"backend 'semkv': the graph returns {len(result)} values, expected logits alone: pass use_cache=False, and ask "
                "for neither hidden states nor attentions"
            )
        return result[0]


def _with_weights_as_inputs(body: GraphModule) -> tuple[GraphModule, list[int]]:
    """The body with Dynamo's weights as further inputs, and their places among Dynamo's: another model's weights, or
    updated ones, may come with each call."""
    module = copy_graph_module(body)
    places: dict[int, Node] = {}
    last = [node for node in module.graph.nodes if node.op == "placeholder"][-1]
    for node in list(module.graph.nodes):
        if node.op != "get_attr" or not str(node.target).startswith(HELD):
            continue
        place = int(str(node.target).removeprefix(HELD))
        if place not in places:
            with module.graph.inserting_after(last):
                last = places[place] = module.graph.placeholder(f"{HELD}{place}")
                last.meta = dict(node.meta)
        node.replace_all_uses_with(places[place])
        module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()
    return module, list(places)


__all__ = ["semkv"]
