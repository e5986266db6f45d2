"""Which node of a captured graph is what the user's model makes of ids: the result of its embedding module."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule, Node

from semkv.ir.seams import EMBEDDINGS


def mark_embeddings(model: nn.Module, module: GraphModule) -> None:
    """Mark the last node that lies in the module that `get_input_embeddings` of `model` names; none where it has no such method."""
    path = _path(model)
    inside = [node for node in module.graph.nodes if path and node.op == "call_function" and _within(node, path)]
    leaving = [node for node in inside if any(user not in inside for user in node.users)]
    if len(leaving) == 1:
        leaving[0].meta[EMBEDDINGS] = True


def takes_more(model: nn.Module) -> bool:
    """Whether the model says that it takes other things than text, such as images."""
    modalities = getattr(model, "input_modalities", "text")
    return set([modalities] if isinstance(modalities, str) else modalities) != {"text"}


def _path(model: nn.Module) -> str:
    """Where the embedding module is; "" where nothing says it."""
    find = getattr(model, "get_input_embeddings", None)
    try:
        found = find() if callable(find) else None
    except (AttributeError, NotImplementedError):
        return ""
    return next((path for path, each in model.named_modules() if each is found), "") if found is not None else ""


def _within(node: Node, path: str) -> bool:
    stack = node.meta.get("nn_module_stack") or {}
    return any(place.strip(".") == path for place, _ in stack.values())


__all__ = ["mark_embeddings", "takes_more"]
