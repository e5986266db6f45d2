"""What an exported step takes and gives: its tensors by name, and what each site's turn reads of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from semkv.errors import ConfigError, StateError
from semkv.ir.state_ops import EMPTY
from semkv.methods.speculation import KEYS, Speculation, SpeculativeRouter
from semkv.runtime.components import Bringer, Components, Giver, Passer
from semkv.runtime.decode.layer_step import NUMBERS, PLACES, Layer
from semkv.runtime.decode.row_turns import Layers, turns_of
from semkv.runtime.decode.step_graph import Turn
from semkv.runtime.placement import Placement
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.state import State

RANKING = "ranking"
AXES = {"recent": "capacity", "kept": "kept", "slots": "slots", "waiting": "waiting"}
"""By the beginning of a tensor's name, which of its part's sizes its third dimension is; units otherwise."""
BOUNDS, OF_WAITING = "places.bounds", ("places.order", "places.where")
KINDS = {
    "recent": "the newest tokens, exact; the step writes the new one at `at`",
    "kept": "exact tokens that stay",
    "slots": "folded tokens that are unfolded now; the step changes them to what the query chooses",
    "waiting": "all folded tokens, which the step copies to slots",
    "places": "where the tokens of each folded unit wait",
    "": "what is known of each folded unit, from which the step chooses",
}


@dataclass(frozen=True)
class Field:
    """A tensor of a step's state: shape with the number of each size or its symbol, `rows` first. written: whether the step replaces it.
    fill: what stands behind what is stored."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    kind: str
    written: bool = False
    fill: int = 0


@dataclass(frozen=True)
class StepPart:
    """A run [first, last) of the KV heads of one store, whose tensors have names that begin with `prefix`; its numbers are the
    `number`-th ones. local: those names without the prefix. length: tokens of each unit, 0 where that differs."""

    store: int
    part: int
    first: int
    last: int
    prefix: str
    number: int
    local: tuple[str, ...]
    length: int


@dataclass(frozen=True)
class SiteTurn:
    """A part's turn at one site; ranked: whether its units are ranked before the first layer."""

    part: StepPart
    layer: Layer
    constants: Mapping[str, Tensor]
    ranked: bool


@dataclass(frozen=True)
class Layout:
    """parts: in the order of their numbers; turns: by site, of each of its parts; fields: all state by name, in the order of the inputs.
    selection: what ranks tokens before the first layer."""

    placement: Placement
    parts: tuple[StepPart, ...]
    turns: tuple[tuple[SiteTurn, ...], ...]
    fields: Mapping[str, Field] = field(default_factory=dict)
    selection: Speculation | None = None

    @classmethod
    def of(cls, placement: Placement, state: State) -> Layout:
        """As the first row of `state` has it, which a method compresses where there is one.

        Raises
        ------
        ConfigError: a method, or a way of it, whose step asks for more than tensors; or a row that nothing is folded in yet.
        """
        check_plan(placement)
        row, turns = next_turns(state, 0)
        if row.exact and placement.budget.value is not None and not placement.budget.keeps_all:
            raise ConfigError(
                f"the example has {row.tokens} tokens, which the budget holds whole: give one of more tokens, in which the method "
                f"{placement.method!r} has something to do"
            )
        parts: list[StepPart] = []
        known: dict[tuple[int, int], StepPart] = {}
        fields: dict[str, Field] = {}
        sites: list[tuple[SiteTurn, ...]] = []
        for site, own in zip(placement.program.sites, turns):
            store = placement.stores[site.store]
            places = row.placement.parts(store)
            made = []
            for number, (place, turn) in enumerate(zip(places, own)):
                turn = general(turn)
                key = (site.store, number)
                if key not in known:
                    prefix = f"layers.{store.index}." + (f"part{number}." if len(places) > 1 else "")
                    local = tuple(name for name in turn.tensors if name not in (RANKING, PLACES))
                    known[key] = StepPart(
                        site.store, number, place.first, place.last, prefix, len(parts), local, turn.layer.length
                    )
                    parts.append(known[key])
                    fields |= {x.name: x for x in _fields(known[key], turn, place.components)}
                ranked = turn.layer.reads and isinstance(turn.layer.components.router, SpeculativeRouter)
                made.append(SiteTurn(known[key], turn.layer, turn.constants, ranked))
            sites.append(tuple(made))
        before = placement.plan.before
        selection = before if isinstance(before, Speculation) else None
        if selection is not None:
            fields |= {x.name: x for x in _retrieval_fields(selection, state)}
        return cls(placement, tuple(parts), tuple(sites), fields, selection)

    @property
    def written(self) -> tuple[str, ...]:
        """Names of what the step replaces."""
        return tuple(name for name, x in self.fields.items() if x.written)

    def symbols(self) -> tuple[str, ...]:
        """Names of the sizes that may differ, `rows` first."""
        return tuple(
            dict.fromkeys(
                part for x in self.fields.values() for part in x.shape if isinstance(part, str) and "+" not in part
            )
        )


def check_plan(placement: Placement) -> None:
    """Raise `ConfigError` where the method's step is no graph of tensors, or not of those that a file can have."""
    method, plan = placement.method, placement.plan
    if placement.device.type != "cpu":
        raise ConfigError(
            f"export of a model on {placement.device}: load or compile it on the CPU, from where it is exported"
        )
    if placement.steps is None:
        raise ConfigError(
            f"method {method!r} as it is set cannot be exported: its step asks the host; use another method or router"
        )
    for components in plan.all_components():
        if not getattr(components.forms, "only_if_smaller", True):
            raise ConfigError(
                f"method {method!r} as it is set cannot be exported: spans wait as factors; set forms='int8' or forms='raw'"
            )
        if isinstance(components.router, Bringer) and not isinstance(components.router, SpeculativeRouter):
            raise ConfigError(
                f"method {method!r} as it is set cannot be exported: its router {type(components.router).__name__} reads more of a row "
                "than a step's tensors; methods that can: full, quest, sketch, sekv, specontext, compresskv and others that keep or page"
            )
    if any(isinstance(actor, Passer) for actor in plan.at_site.values()) or plan.at_site:
        raise ConfigError(
            f"method {method!r} cannot be exported: its layers look at each other's keys; use quest, sketch, sekv or specontext"
        )
    if plan.before is not None and (not isinstance(plan.before, Speculation) or plan.before.strict):
        raise ConfigError(f"method {method!r} with strict keys cannot be exported: set strict=False")


def next_turns(state: State, index: int) -> tuple[RowMemory, list[list[Turn]]]:
    """A copy of a row, and what it brings to its next step."""
    copy = state.select([index])
    (row,) = copy.rows
    folded = [memory.spans for memory in row.memories() if memory.spans is not None]
    if any(spans.has_factors for spans in folded) or not all(memory.graphed for memory in row.memories()):
        raise StateError(
            f"row {index} has folded tokens that wait as factors, or units of several tokens that a ranking goes by: such a step cannot be "
            "exported; compile with forms='int8' where the method has it"
        )
    ids = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    copy.begin_step(ids.to(state.placement.device))
    layers = Layers.of(state.placement.program)
    return row, turns_of(row, ids[0], layers)


def general(turn: Turn) -> Turn:
    """A turn in the form that serves every row: units of several tokens have bounds, and every token that waits its position. Only single
    tokens that follow each other go without."""
    layer, tensors = turn.layer, dict(turn.tensors)
    if not layer.reads or layer.length == 1:
        return turn
    there = {name: torch.zeros(1, 1, dtype=torch.int32, device="cpu") for name in ("lengths", BOUNDS, "places.where")}
    tensors |= {name: x for name, x in there.items() if name not in tensors}
    names = (*layer.tensors, *(name for name in tensors if name not in layer.tensors))
    return replace(turn, layer=replace(layer, length=0, tensors=names), tensors=tensors)


def symbol(prefix: str, name: str) -> str:
    """The symbol of a size of a part: a Python identifier."""
    return f"{prefix}{name}".replace(".", "_")


def axis_of(local: str) -> str:
    """Which size of its part a tensor's third dimension is."""
    if local == BOUNDS:
        return "bounds"
    return "waiting" if local in OF_WAITING else AXES.get(local.split(".")[0], "units")


def _fields(part: StepPart, turn: Turn, components: Components) -> Iterator[Field]:
    for local in part.local:
        x, head, axis = turn.tensors[local], local.split(".")[0], axis_of(local)
        size = symbol(part.prefix, "units") + " + 1" if axis == "bounds" else symbol(part.prefix, axis)
        scored = isinstance(components.evictor, Giver) and local in ("kept.scores", "recent.scores")
        written = scored or (head == "recent" and local != "recent.scores") or (head == "slots" and turn.layer.reads)
        kind = KINDS.get(head, KINDS[""])
        yield Field(
            part.prefix + local, x.dtype, ("rows", x.shape[0], size, *x.shape[2:]), kind, written, fill_of(local)
        )


def fill_of(local: str) -> int:
    """What says that there is nothing."""
    if local in ("recent.positions", "kept.positions", "slots.positions", BOUNDS):
        return EMPTY
    return -1 if local == "slots.places" else 0


def _retrieval_fields(selection: Speculation, state: State) -> Iterator[Field]:
    section, row = selection.section, state.rows[0]
    shape = ("rows", section.kv_heads, "retrieval_capacity", section.head_dim)
    kind = "the retrieval head's keys of all tokens, by position; the step writes the new one"
    yield Field(KEYS, torch.float16, shape, kind, True)
    for site in section.feature_sites:
        name = f"features.{site}"
        told = "hidden states of the token before, as they enter a layer, which the retrieval head reads"
        yield Field(name, torch.float32, ("rows", row.notes[name].shape[-1]), told, True)


__all__ = [
    "NUMBERS",
    "RANKING",
    "Field",
    "Layout",
    "SiteTurn",
    "StepPart",
    "axis_of",
    "check_plan",
    "next_turns",
    "symbol",
]
