"""A decode program that leaves a layer's turn to whoever runs it: what several rows share, and what exported steps are made of."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor
from torch.fx import GraphModule, Node

from semkv.ir import memory
from semkv.ir.graph import copy_graph_module, finish
from semkv.ir.ops import mixed_attention
from semkv.ir.program import Program
from semkv.runtime.decode.step_graph import TERMS


class Attending(Protocol):
    """What takes the turns of a step."""

    def attend(
        self, site: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, terms: Mapping[str, Tensor]
    ) -> Tensor:
        """Store a new token of each row and attend for it: q [B, Hq, 1, D], k [B, Hkv, 1, D], v [B, Hkv, 1, Dv], positions int64 [B, 1],
        terms of `TERMS` -> [B, Hq, 1, Dv]."""

    def observe(self, site: int, hidden: Tensor) -> None:
        """Take the hidden states [B, 1, H] with which the tokens enter a site's layer."""


def attend(
    step: Attending, site: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, terms: Mapping[str, Tensor]
) -> Tensor:
    """Graph function of such a program, see `Attending.attend`."""
    return step.attend(site, q, k, v, positions, terms)


def attending(program: Program) -> GraphModule:
    """The decode program, of (ids, positions, `Attending`), with a call of `attend` in place of each question to the memory and the
    attention over its answer."""
    assert program.decode is not None
    module = copy_graph_module(program.decode)
    graph = module.graph
    for node in [x for x in graph.nodes if x.target == memory.entries]:
        items = [item for item in node.users if item.target == operator.getitem]
        (attends,) = {user for item in items for user in item.users if user.target == mixed_attention}
        terms = {name: attends.kwargs[name] for name in TERMS if isinstance(attends.kwargs.get(name), Node)}
        with graph.inserting_before(attends):
            made = graph.call_function(attend, (*node.args, terms))
        attends.replace_all_uses_with(made)
        for unused in (attends, *items, node):
            graph.erase_node(unused)
    return finish(module)


__all__ = ["Attending", "attending"]
