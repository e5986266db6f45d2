"""The output projection of each attention, found in the graph: where a change of attention reaches the residual stream.

Between an attention and the first products with weights that read it lie views, casts, sometimes a gate or a norm. The
region is run a second time beside the first with another attention output, so that both ends can be compared for any
family, without knowing which weight is called W_O.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from semkv.ir.graph import attention_nodes, descendants, placeholders

from .interpreter import Handler, SiteInterpreter

aten = torch.ops.aten

PRODUCTS = frozenset(
    {
        aten.linear.default,
        aten.addmm.default,
        aten.mm.default,
        aten.matmul.default,
        aten.bmm.default,
        aten.einsum.default,
    }
)
ADDITIONS = frozenset({aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor})


@dataclass(frozen=True)
class OutputRegion:
    """From an attention node to the products with weights that read it.

    inside: nodes computed from the attention, up to and with the ends. ends: where outputs are compared; the attention
    itself where its output meets the residual stream without a projection.
    """

    attention: Node
    inside: frozenset[Node]
    ends: frozenset[Node]


def output_regions(body: GraphModule) -> tuple[OutputRegion, ...]:
    """The region of every attention, in execution order."""
    varying = descendants(placeholders(body.graph).values())
    return tuple(_region(body.graph, node, varying) for node in attention_nodes(body.graph))


def _region(graph: Graph, attention: Node, varying: set[Node]) -> OutputRegion:
    own = descendants([attention])
    others = set(attention_nodes(graph)) | {graph.output_node()}
    inside: set[Node] = set()
    ends: set[Node] = set()
    waiting = list(attention.users)
    while waiting:
        node = waiting.pop()
        if node in inside or not _is_tensor(node):
            continue
        inputs = node.all_input_nodes
        joins = node.target in ADDITIONS and any(i in varying and i not in own and _is_tensor(i) for i in inputs)
        if node in others or joins:
            return OutputRegion(attention, frozenset(), frozenset({attention}))
        inside.add(node)
        if node.target in PRODUCTS and any(_is_tensor(i) and i not in varying for i in inputs):
            ends.add(node)
        else:
            waiting.extend(node.users)
    if not ends:
        return OutputRegion(attention, frozenset(), frozenset({attention}))
    return OutputRegion(attention, frozenset(inside), frozenset(ends))


def _is_tensor(node: Node) -> bool:
    """False for what only reads sizes."""
    return node.op in ("get_attr", "output") or isinstance(
        node.meta.get("val", torch.empty(0, dtype=torch.float32, device="cpu")), Tensor
    )


Compare = Callable[[int, Tensor, Tensor], None]
"""Called at each end of a region with the site's index and both outputs, [tokens, features]."""


class ShadowInterpreter(SiteInterpreter):
    """Interprets a body, and between each attention and its output projection a second time with other attention.

    The handler gives `shadow[site]` = output [Hq, T, Dv] before it returns, for the sites that are to be compared.
    """

    def __init__(
        self, body: GraphModule, regions: tuple[OutputRegion, ...], handler: Handler, compare: Compare
    ) -> None:
        super().__init__(body, handler)
        self.compare = compare
        self.shadow: dict[int, Tensor] = {}
        self.values: dict[int, dict[Node, Any]] = {}
        self.left: dict[int, set[Node]] = {}
        self.sites = {region.attention: (index, region) for index, region in enumerate(regions)}
        self.users: dict[Node, list[tuple[int, OutputRegion]]] = {}
        for index, region in enumerate(regions):
            for node in region.inside:
                self.users.setdefault(node, []).append((index, region))

    def run_node(self, n: Node) -> Any:
        """Run a node; where it lies in a region that has a shadow, run it again for the shadow."""
        result = super().run_node(n)
        if n in self.sites:
            index, region = self.sites[n]
            other = self.shadow.pop(index, None)
            if other is not None:
                changed = other[None].to(result.dtype)
                if n in region.ends:
                    self.compare(index, _per_token(result[0]), _per_token(changed[0]))
                else:
                    self.values[index], self.left[index] = {n: changed}, set(region.ends)
        for index, region in self.users.get(n, ()):
            values = self.values.get(index)
            if values is None:
                continue
            args, kwargs = map_arg((n.args, n.kwargs), partial(self._second, values))
            values[n] = super().call_function(n.target, args, kwargs)
            if n in region.ends:
                self.compare(index, result.flatten(0, -2), values.pop(n).flatten(0, -2))
                self.left[index].discard(n)
                if not self.left[index]:
                    del self.values[index]
        return result

    def _second(self, values: dict[Node, Any], node: Node) -> Any:
        """A node's value in the shadow's run, the first run's where the two are the same."""
        return values[node] if node in values else self.env[node]


def _per_token(output: Tensor) -> Tensor:
    """[Hq, T, Dv] -> [T, Hq * Dv]."""
    return output.transpose(0, 1).flatten(1)
