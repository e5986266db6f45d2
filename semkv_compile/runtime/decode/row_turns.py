"""What one row brings to a step's graph and takes from it: between steps its memory makes room, inside a step nothing asks the host."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import GraphModule

from semkv.ir.ops import mixed_attention
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.kernels.segments import Behind
from semkv.runtime.components import Components, Giver, Plan, Scorer, Taker
from semkv.runtime.decode.layer_step import PLACES, Layer
from semkv.runtime.decode.many_rows import ManyRows
from semkv.runtime.decode.step_graph import TERMS, Prepare, StepGraphs, Turn, Turns
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.store.site_memory import SiteMemory

POSITIONS = 256
"""Places by position that are allocated at a time."""


def serves(plan: Plan) -> bool:
    """Whether steps of a method are graphs: all that it does in one is told in tensors."""
    return all(_serves(components) for components in plan.all_components())


def _serves(components: Components) -> bool:
    if components.evictor is not None and not isinstance(components.evictor, Giver):
        return False
    reads = components.unfold and components.router is not None
    return not reads or isinstance(components.router, Scorer)


@dataclass
class Layers:
    """The layers of a program as traces know them. settings: what the attention of each site is called with, but for tensors; last: what
    rows brought to their last steps."""

    settings: Mapping[int, Mapping[str, object]]
    last: WeakKeyDictionary[RowMemory, Turns] = field(default_factory=WeakKeyDictionary)
    _known: dict[tuple[object, ...], tuple[Layer, dict[str, Tensor]]] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program) -> Layers:
        """Of a lowered program."""
        assert program.decode is not None
        found = {}
        for node in program.decode.graph.nodes:
            if node.target == mixed_attention:
                found[node.args[2].args[0].args[1]] = {k: v for k, v in node.kwargs.items() if k not in TERMS}
        return cls(found)

    def layer(
        self, site: AttentionSite, owner: bool, memory: SiteMemory, tensors: dict[str, Tensor], plan: Plan
    ) -> tuple[Layer, dict[str, Tensor]]:
        """The layer of a part's site, and its constants."""
        components, reads = memory.components, memory.reads_units
        factors = memory.spans.factor_sizes if reads else None
        length = memory.spans.places.length if reads and factors is None else 0
        passer = plan.passers.get(site.index)
        key = (id(components), site.index, site.first_head, owner, reads, length, factors, tuple(tensors), id(passer))
        if key not in self._known:
            constants = _constants(site, components, memory.device) if reads else {}
            if factors is not None:
                constants["constant.eye"] = torch.eye(site.group_size, dtype=torch.bool, device=memory.device)
            router = components.router
            taken = router.taken(site) if reads and isinstance(router, Taker) else ()
            passes = () if passer is None else passer.names(site)
            names = (*tensors, *constants, *(name for name in taken if name not in passes))
            made = Layer(site, components, owner, reads, length, names, factors, self.settings[site.index])
            if passer is not None:
                made = replace(made, passer=passer, passes=passes)
            self._known[key] = made, constants
        return self._known[key]


def _constants(site: AttentionSite, components: Components, device: torch.device) -> dict[str, Tensor]:
    router = components.router
    assert isinstance(router, Scorer)
    found = {f"constant.{name}": x for name, x in router.constants(site).items()}
    if not components.fill:
        found["threshold"] = router.threshold(site).float().view(site.kv_heads, site.group_size)
    return {name: x.to(device) for name, x in found.items()}


def turns_of(row: RowMemory, ids: Tensor, layers: Layers) -> Turns:
    """Make room for a token ids int64 [1] in every store, and say what each part of each site brings."""
    placement, tokens = row.placement, row.tokens + 1
    turns = layers.last.setdefault(row, Turns([] for _ in placement.program.sites))
    nothing = torch.empty(0, 0, 0, dtype=torch.float32, device="cpu")
    for site in placement.program.sites:
        store, memories = placement.stores[site.store], row.stores[site.store]
        parts, owner = placement.parts(store), site.index == store.index
        places = row.admit(store) if owner else [0] * len(parts)
        rooms = row.workspace_allowance(store, tokens)
        own = turns[site.index]
        if len(own) != len(parts):
            own.clear()
        for number, (part, memory, at, room) in enumerate(zip(parts, memories, places, rooms)):
            mine = part.site(site)
            count, usable, start, shift = memory.prepare(mine, room)
            tensors, bringer, back = memory.step_tensors(), memory.components.bringer, []
            if bringer is not None and memory.reads_units:
                brought = bringer.bring(mine, row.step_of(site, ids, nothing), memory.spans)
                tensors = {**tensors, **memory.there.brought.tensors(brought.tensors)}
                back = [(brought.tensors[name], tensors[name]) for name in brought.written]
                count, start = count + brought.skipped, start - brought.skipped
            if site.index in placement.plan.passers:
                tensors = {
                    **tensors,
                    PLACES: memory.there.by_position((tokens + POSITIONS) // POSITIONS * POSITIONS + 1),
                }
            layer, constants = layers.layer(mine, owner, memory, tensors, placement.plan)
            if number == len(own) or own[number].tensors is not tensors or own[number].layer is not layer:
                turns.put(site.index, number, Turn(layer, (), tensors, constants, back))
            own[number].numbers = (at, count, usable, start, shift)
    return turns


def take_turns(row: RowMemory, turns: Sequence[Sequence[Turn]], told: Iterator[tuple[list[int], list[int]]]) -> None:
    """Count what a step did to a row; told: for each turn that reads units, tokens copied and there, and units that each head read."""
    placement, tokens = row.placement, row.tokens + 1
    for site, own in zip(placement.program.sites, turns):
        store, memories = placement.stores[site.store], row.stores[site.store]
        for turn, memory in zip(own, memories):
            if turn.layer.reads:
                (moved, held), read = next(told)
                memory.took(moved, held, read)
            for mine, there in turn.back:
                if mine is not there:
                    mine.copy_(there)
        row.account(site, store, memories, tokens)


class GraphedSteps:
    """Decode steps of one program: of one row by `StepGraphs`, of several by `ManyRows`.

    prepare: see `StepGraphs`; between: of the graph between the turns of several rows; turns: of a turn's graph what makes what runs it,
    for a row each; None: several rows are not served.
    """

    def __init__(
        self,
        program: Program,
        prepare: Prepare,
        between: Callable[[GraphModule], Callable[..., tuple[Tensor, ...]]] | None = None,
        turns: Callable[[GraphModule], Callable[[], Callable[..., tuple[Tensor, ...]]]] | None = None,
    ) -> None:
        self.program, self._made_by = program, (prepare, between, turns)
        self.graphs, self.layers = StepGraphs(program, prepare), Layers.of(program)
        self.many = None if between is None or turns is None else ManyRows(program, self.graphs, between, turns)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedSteps:
        """Those of a copy of the program; their graphs are made anew."""
        made = memo[id(self)] = GraphedSteps(copy.deepcopy(self.program, memo), *self._made_by)
        return made

    def reasons(self) -> list[str]:
        """Why graphs of steps that have run were not one call of C++ the last time, each reason once: nodes that have no instructions."""
        many = [] if self.many is None else self.many.reasons()
        return sorted({reason for reason in (*self.graphs.reasons(), *many) if reason is not None})

    def serves(self, rows: Sequence[RowMemory]) -> bool:
        """Whether the next step of these rows is a graph."""
        if self.many is None and len(rows) > 1:
            return False
        return all(memory.graphed for row in rows for memory in row.memories())

    def step(
        self,
        rows: Sequence[RowMemory],
        ids: Tensor,
        positions: Tensor,
        known: Tensor,
        failures: dict[int, Exception] | None = None,
    ) -> Tensor:
        """Run the tokens ids int64 [B, 1] at `positions` int64 [B, 1], a row each -> hidden [B, 1, H]. known [B, 1]: the ids on
        the host. failures: rows that are out of the step, and why; those that find no room join them, and their hidden states are zeros.
        None: such an error ends the step."""
        turns: dict[int, Turns] = {}
        for r, row in enumerate(rows):
            try:
                if not failures or r not in failures:
                    turns[r] = turns_of(row, known[r], self.layers)
            except Exception as error:
                if failures is None:
                    raise
                failures[r] = error
        if len(turns) == len(rows):
            return self._run(rows, list(turns.values()), ids, positions, known)
        going = list(turns)
        if not going:
            raise next(iter(failures.values()))
        own = [x[going] for x in (ids, positions, known)]
        hidden = self._run([rows[r] for r in going], list(turns.values()), *own)
        out = hidden.new_zeros(len(rows), *hidden.shape[1:])
        out[going] = hidden
        return out

    def _run(
        self,
        rows: Sequence[RowMemory],
        turns: Sequence[Turns],
        ids: Tensor,
        positions: Tensor,
        known: Tensor,
    ) -> Tensor:
        """`step` of rows that have made room."""
        asking = [row for row in rows if row.past is not None]
        sites = rows[0].placement.program.sites if asking else ()
        queried = {site.index for site in sites if site.treatment == "method"}
        plans = [row.placement.plan for row in rows]
        asked = tuple(sorted(queried | {site for plan in plans for site in plan.at_site if site not in plan.passers}))
        if len(rows) == 1:
            hidden, moved, read, noted, observed = self._alone(rows[0], turns[0], ids, positions, asked)
            found = list(zip(moved, _lists(read)))
        else:
            assert self.many is not None
            hidden, found, noted, observed = self.many.run(rows, turns, ids, positions, asked)
        told = iter(found)
        for row, own in zip(rows, turns):
            take_turns(row, own, told)
        queries = dict(zip(asked, noted))
        for site, hidden_there in zip(observed, noted[len(asked) :]):
            for r, row in enumerate(rows):
                row.observe(site, hidden_there[r])
        for r, row in enumerate(rows):
            plan, sites = row.placement.plan, row.placement.program.sites
            for site, q in queries.items():
                if row.past is not None:
                    row.past.asked(sites[site], q[r])
                if site in plan.at_site and site not in plan.passers:
                    plan.at_site[site].stored(row.step_of(sites[site], known[r], q[r]))
        return hidden

    def _alone(
        self, row: RowMemory, turns: Turns, ids: Tensor, positions: Tensor, asked: tuple[int, ...]
    ) -> tuple[Tensor, list[list[int]], list[Tensor], list[Tensor], tuple[int, ...]]:
        """The step of one row: hidden; of turns that read units, tokens copied and there, and units read; queries and hidden states."""
        graph, program = self.graphs.of(turns, asked), row.placement.program
        numbers = torch.tensor([turn.numbers for turn in turns.flat], dtype=torch.int64, device="cpu")[..., None]
        others = [x for site in program.stateful for x in row.recurrent[site.index]]
        if program.seams.rotary:
            others.append(torch.tensor([[row.turned]], dtype=torch.int64, device=ids.device))
        state = Behind([*turns.behind, *others]) if others else turns.behind
        hidden, *more = graph.run(ids, positions, numbers.to(ids.device), behind=state)
        reading = sum(turn.layer.reads for turn in turns.flat)
        if not reading:
            return hidden, [], [], more, graph.observed
        told, noted = more[: 1 + reading], more[1 + reading :]
        moved, *read = told if ids.device.type == "cpu" else _on_host(told)
        return hidden, moved[:, 0].tolist(), [x[0] for x in read], noted, graph.observed


def _lists(told: Sequence[Tensor]) -> Iterator[list[int]]:
    """Tensors [n] of whole numbers as lists."""
    numbers = iter(torch.cat(list(told)).tolist() if told else [])
    return (list(islice(numbers, len(x))) for x in told)


def _on_host(told: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of whole numbers on the host, which waits once."""
    whole = torch.cat([x.flatten() for x in told]).cpu()
    return [part.view(x.shape) for part, x in zip(whole.split([x.numel() for x in told]), told)]


__all__ = ["GraphedSteps", "serves"]
