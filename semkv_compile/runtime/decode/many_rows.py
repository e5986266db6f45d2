"""Decode steps of several rows: what all tokens share is one graph, each row's turn of a layer is a graph of its own.

So rows come and go without a new graph, and what grows in one row changes nothing for the others. Both are the graphs of a step of one row
(`semkv.runtime.decode.step_graph`), cut where a layer's turn begins and ends. Where C++ runs them, the turns of all rows in a layer are one
call (`semkv.kernels.segments.together`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from semkv.ir.graph import placeholders
from semkv.ir.program import Program
from semkv.kernels.segments import Behind, Segment, Standing, Together
from semkv.runtime.decode.attending import attending
from semkv.runtime.decode.step_graph import TRACING, StepGraphs, Turn
from semkv.runtime.prompt.content import Contents
from semkv.runtime.recurrent import keep_states, stacked_states
from semkv.runtime.row_memory import RowMemory

aten = torch.ops.aten
BEFORE_STATE = 5
"""Inputs of a turn's graph before its state: queries, keys, values, positions, numbers."""
Prepare = Callable[[GraphModule], Callable[..., Any]]
Told = tuple[list[int], list[int]]
"""Of a turn that reads units: tokens copied and there, and units that each head read."""


@dataclass
class RowCalls:
    """What calls one row's turns with. numbers int64 [turns, len(NUMBERS), 1], written before each step; calls: of its turns, by
    site and first head, with the layer that they are for; standing: of those that are made with other rows', by site."""

    numbers: Tensor
    each: list[Tensor]
    calls: dict[tuple[int, int], tuple[object, Callable[..., Any]]] = field(default_factory=dict)
    standing: dict[int, Standing] = field(default_factory=dict)


class ManyRows:
    """Steps over B rows of one program. shared: makes of the graph between turns what runs it; own: of a turn's what makes what runs it,
    for each row and layer."""

    def __init__(
        self,
        program: Program,
        graphs: StepGraphs,
        shared: Prepare,
        own: Callable[[GraphModule], Callable[[], Callable[..., Any]]],
    ) -> None:
        self.program, self.graphs, self.shared, self.own = program, graphs, shared, own
        self._between: Callable[..., Any] | None = None
        self._rows: WeakKeyDictionary[RowMemory, RowCalls] = WeakKeyDictionary()
        self._turns: dict[int, Callable[[], Callable[..., Any]]] = {}
        self._together: Together | None = None

    def run(
        self,
        rows: Sequence[RowMemory],
        turns: Sequence[Sequence[Sequence[Turn]]],
        ids: Tensor,
        positions: Tensor,
        asked: tuple[int, ...],
    ) -> tuple[Tensor, list[Told], list[Tensor], tuple[int, ...]]:
        """ids, positions int64 [B, 1]; turns: of each row its sites, of each site its parts.

        Returns hidden [B, 1, H]; what each turn that reads units told, row by row; queries [B, Hq, 1, D] of each site of `asked` and
        hidden states [B, 1, H] that enter each observed site; those sites.
        """
        with TRACING:
            if self._between is None:
                self._between = self.shared(attending(self.program))
        step = _Step(self, rows, [self._calls_of(*each) for each in zip(rows, turns)], turns)
        hidden = self._between(ids, positions, step)
        while isinstance(hidden, (tuple, list)):
            (hidden,) = hidden
        noted = [*(step.queries[site] for site in asked), *step.observed.values()]
        return hidden, [x for own in step.told for x in own], noted, tuple(step.observed)

    def reasons(self) -> list[str | None]:
        """See `StepGraphs.reasons`, of the turns of all rows."""
        return [getattr(call, "reason", None) for row in self._rows.values() for _, call in row.calls.values()]

    def _calls_of(self, row: RowMemory, turns: Sequence[Sequence[Turn]]) -> RowCalls:
        """That of a row, with the numbers of this step."""
        numbers = torch.tensor([turn.numbers for own in turns for turn in own], dtype=torch.int64, device="cpu")[
            ..., None
        ]
        known = self._rows.get(row)
        if known is None or known.numbers.shape != numbers.shape:
            known = self._rows[row] = RowCalls(numbers, list(numbers))
        known.numbers.copy_(numbers)
        return known

    def turn_of(
        self, row: RowCalls, turn: Turn, terms: Mapping[str, Tensor], passed: dict[str, Tensor]
    ) -> Callable[..., Any]:
        """What computes a turn of a row."""
        site = turn.layer.site
        place = site.index, site.first_head
        known = row.calls.get(place)
        if known is None or known[0] is not turn.layer:
            with TRACING:
                trace = self.graphs.trace(turn, dict(terms), passed)
                if id(trace) not in self._turns:
                    self._turns[id(trace)] = self.own(_without_batch(trace, turn))
                known = row.calls[place] = turn.layer, self._turns[id(trace)]()
        return known[1]

    def together(
        self, rows: Sequence[RowCalls], turns: Sequence[Turn], given: tuple[Tensor, ...], numbers: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """What the turns of all rows in one layer return, as one call of C++. given: inputs [B, ...] that have a row for each; numbers:
        each one's. None where that cannot be."""
        calls, site = list[Standing](), turns[0].layer.site.index
        for r, (row, turn) in enumerate(zip(rows, turns)):
            if turn.layer.passes or len(turn.layer.tensors) != len(turn.behind):
                return None
            call, behind = row.standing.get(site), turn.behind
            if call is None or not call.stands(behind):
                segment = self.turn_of(row, turn, {}, {})
                mine = [x[r : r + 1] for x in given]
                found = Standing.of(segment, mine, [numbers[r]], behind) if isinstance(segment, Segment) else None
                if found is None:
                    return None
                call = row.standing[site] = found
            calls.append(call)
        if self._together is None:
            self._together = Together()
        return self._together(calls, given)


class _Step(Contents):
    """What the graph between turns asks in one step. told: of each row, what its turns that read units told. queries: of each site;
    observed: hidden states that enter a site's layer."""

    def __init__(
        self,
        many: ManyRows,
        memories: Sequence[RowMemory],
        rows: Sequence[RowCalls],
        turns: Sequence[Sequence[Sequence[Turn]]],
    ) -> None:
        self.many, self.memories, self.rows, self.turns = many, memories, rows, turns
        self.told: list[list[Told]] = [[] for _ in rows]
        self._passed: list[dict[str, Tensor]] = [{} for _ in rows]
        self.queries: dict[int, Tensor] = {}
        self.observed: dict[int, Tensor] = {}
        self._at = [0] * len(rows)

    def attend(
        self, site: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, terms: Mapping[str, Tensor]
    ) -> Tensor:
        """See `semkv.runtime.decode.attending.Attending`: the turns of all rows in one layer."""
        self.queries[site] = q
        if not terms and all(len(turns[site]) == 1 for turns in self.turns):
            found = self._together(site, (q, k, v, positions))
            if found is not None:
                return found
        whole, out = self.many.program.sites[site], []
        given_to = zip(*(x.split(1) for x in (q, k, v, positions)))
        for r, (row, turns, mine) in enumerate(zip(self.rows, self.turns, given_to)):
            made = []
            for number, turn in enumerate(turns[site], self._at[r]):
                part, given, own = turn.layer.site, mine, terms
                if part.kv_heads != whole.kv_heads:
                    heads, asking = slice(part.first_head, part.first_head + part.kv_heads), part.query_heads
                    given = (mine[0][:, asking], mine[1][:, heads], mine[2][:, heads], mine[3])
                    own = {name: x[asking] for name, x in terms.items()}
                made.append(self._turn(r, row, turn, given, row.each[number], own))
            out.append(made[0] if len(made) == 1 else torch.cat(made, 1))
            self._at[r] += len(made)
        return torch.cat(out)

    def _together(self, site: int, given: tuple[Tensor, ...]) -> Tensor | None:
        """`attend` of rows of one part each as one call; None where that cannot be."""
        turns = [own[site][0] for own in self.turns]
        made = self.many.together(self.rows, turns, given, [row.each[at] for row, at in zip(self.rows, self._at)])
        if made is None:
            return None
        out, *more = made
        if turns[0].layer.reads:
            for own, *told in zip(self.told, *(x.tolist() for x in more)):
                own.append(tuple(told))
        self._at = [at + 1 for at in self._at]
        return out

    def turned_rows(self) -> list[int]:
        """See `semkv.runtime.prompt.content.Contents`."""
        return [row.turned for row in self.memories]

    def read_states(self, site: int) -> list[Tensor]:
        """See `semkv.ir.memory.States.read_states`."""
        return stacked_states(self.memories, site)

    def write_states(self, site: int, states: Sequence[Tensor]) -> None:
        """See `semkv.ir.memory.States.write_states`."""
        keep_states(self.memories, site, states)

    def observe(self, site: int, hidden: Tensor) -> None:
        """See `semkv.runtime.decode.attending.Attending`."""
        self.observed[site] = hidden

    def _turn(
        self,
        r: int,
        row: RowCalls,
        turn: Turn,
        given: tuple[Tensor, ...],
        numbers: Tensor,
        terms: Mapping[str, Tensor],
    ) -> Tensor:
        layer, passed = turn.layer, self._passed[r]
        call = self.many.turn_of(row, turn, terms, passed)
        behind, others = turn.behind, [*(passed[name] for name in layer.tensors[len(turn.behind) :]), *terms.values()]
        out, *more = call(*given, numbers, behind=Behind([*behind, *others]) if others else behind)
        if layer.reads:
            moved, read, *more = more
            self.told[r].append((moved[0].tolist(), read[0].tolist()))
        if layer.passes:
            passed.update(zip(layer.passes, more))
        return out


def _without_batch(trace: GraphModule, turn: Turn) -> GraphModule:
    """A turn's graph whose inputs of the row's state have no dimension of rows."""
    graph, copies = Graph(), {}
    inputs: list[Node] = list(placeholders(trace.graph).values())
    for node in inputs:
        copies[node] = graph.placeholder(str(node.target))
    for node, name in zip(inputs[BEFORE_STATE:], turn.layer.tensors):
        if name in turn.tensors:
            copies[node] = graph.call_function(aten.unsqueeze.default, (copies[node], 0))
    for node in trace.graph.nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return GraphModule(trace, graph)


__all__ = ["ManyRows"]
