"""The rows of a state as the inputs of an exported step: one batch, each tensor padded to the largest row's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from semkv.errors import ConfigError, StateError
from semkv.export.layout import BOUNDS, RANKING, Field, Layout, StepPart, axis_of, next_turns
from semkv.methods.speculation import KEYS, NEWEST, UNREAD
from semkv.runtime.decode.layer_step import NUMBERS, PLACES
from semkv.runtime.decode.step_graph import Turn
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.state import State

AT, COUNT, ROOM, START, SHIFT = range(len(NUMBERS))


@dataclass(frozen=True)
class Rows:
    """What the next step of a state takes: ids, positions int64 [B, 1], numbers int64 [parts, len(NUMBERS), B], state by name [B, ...]."""

    ids: Tensor
    positions: Tensor
    numbers: Tensor
    state: Mapping[str, Tensor]

    def inputs(self) -> dict[str, Tensor]:
        """All of them by name, in the order of the step's inputs."""
        return {"ids": self.ids, "positions": self.positions, "numbers": self.numbers, **self.state}


class Heads(NamedTuple):
    """KV heads [first, last) of the `all` that a row's part has."""

    first: int
    last: int
    all: int

    def of(self, x: Tensor) -> Tensor:
        """Their rows of x, which has one for each head, for each of their query heads, or one that is all heads'."""
        each = x.shape[0] // self.all
        return x if x.shape[0] == 1 else x[self.first * each : self.last * each]


def rows_of(layout: Layout, state: State) -> Rows:
    """The rows of `state`, which has room ahead (`State.reserve`), for the step of `layout`.

    Raises
    ------
    ConfigError: no room was made ahead. StateError: a row that does not fit the step, such as one that keeps its tokens in another form.
    """
    if not state.rows or not state.reserved:
        raise ConfigError(
            "the state has no room for further tokens: call state.reserve(n) before, n being the tokens that follow elsewhere"
        )
    made = [_row(layout, state, index) for index in range(len(state.rows))]
    sizes: dict[str, int] = {}
    for name, field in layout.fields.items():
        for told, dim in _sized(field):
            size, _, more = told.partition(" + ")
            sizes[size] = max(sizes.get(size, 1), *(own[name].shape[dim] - int(more or 0) for own, _ in made))
    stacked = {name: _stacked(field, [own[name] for own, _ in made], sizes) for name, field in layout.fields.items()}
    ids = state.logits.argmax(-1, keepdim=True) if state.pending is None else state.pending
    positions = torch.tensor(state.lengths, dtype=torch.int64, device="cpu")[:, None]
    return Rows(ids.cpu(), positions, torch.stack([numbers for _, numbers in made], -1), stacked)


def _row(layout: Layout, state: State, index: int) -> tuple[dict[str, Tensor], Tensor]:
    """One row's tensors by name, and its numbers int64 [parts, len(NUMBERS)]."""
    row, turns = next_turns(state, index)
    numbers = torch.zeros(len(layout.parts), len(NUMBERS), dtype=torch.int64, device="cpu")
    tensors: dict[str, Tensor] = {}
    owners = {store.store: store.index for store in layout.placement.program.stores}
    for part in layout.parts:
        own, whole = turns[owners[part.store]], row.placement.parts(layout.placement.stores[part.store])
        number = part.part if len(own) > part.part and whole[part.part].first == part.first else 0
        turn, first = own[number], whole[number].first
        if whole[number].last < part.last:
            raise StateError(
                f"row {index} divides the heads of {part.prefix[:-1]} in another way than the exported step"
            )
        heads = Heads(part.first - first, part.last - first, whole[number].last - first)
        brought, told = _fitted(layout, part, turn, row, heads, index)
        tensors |= brought
        numbers[part.number] = told
    if layout.selection is not None:
        tensors |= _retrieval(layout, state.rows[index], state.reserved, index)
    return tensors, numbers


def _fitted(
    layout: Layout, part: StepPart, turn: Turn, row: RowMemory, heads: Heads, index: int
) -> tuple[dict[str, Tensor], Tensor]:
    """A part's tensors as the step has them, and its numbers."""
    numbers = torch.tensor(turn.numbers, dtype=torch.int64, device="cpu")
    given = {name: x for name, x in turn.tensors.items() if name not in (RANKING, PLACES)}
    memory = row.stores[part.store][min(part.part, len(row.stores[part.store]) - 1)]
    if turn.layer.reads:
        if RANKING in turn.tensors:  # the step itself says where the ranking begins
            skipped = memory.spans.places.start + memory.spans.places.shift
            numbers[COUNT] -= skipped
            numbers[START] += skipped
        given = _placed(part, given, numbers, turn.layer.length)
    extra = sorted(set(given) - set(part.local))
    if extra:
        raise StateError(
            f"row {index} keeps {extra[0]!r} in {part.prefix[:-1]}, which the exported step does not have: export with example=state, "
            "a state like this one"
        )
    made = {}
    for local in part.local:
        field = layout.fields[part.prefix + local]
        x = given.get(local)
        if x is None:
            sizes = [
                size if isinstance(size, int) else 2 if axis_of(local) == "bounds" else 1 for size in field.shape[1:]
            ]
            if local in ("recent.k_scale", "recent.v_scale"):
                raise StateError(
                    f"row {index} is short and holds its tokens as numbers, the exported step as codes: let it outgrow the budget's floor, "
                    "or compile with floor=0"
                )
            x = torch.full(sizes, field.fill, dtype=field.dtype, device="cpu")
        x = heads.of(x)
        x = x.expand(int(field.shape[1]), *x.shape[1:]) if x.shape[0] == 1 else x
        if x.dtype != field.dtype or x.shape[0] != field.shape[1] or x.shape[2:] != field.shape[3:]:
            raise StateError(
                f"row {index} holds {field.name} as {x.dtype} {tuple(x.shape)}, the exported step as {field.dtype} {field.shape[1:]}: "
                "export with example=state, a state like this one"
            )
        made[field.name] = x
    return made, numbers


def _placed(part: StepPart, given: dict[str, Tensor], numbers: Tensor, length: int) -> dict[str, Tensor]:
    """`given`, with tables of where units wait in the form that the step has; `numbers` are changed with it."""
    waiting = given["waiting.k"].shape[1]
    if part.length and length != part.length:
        raise StateError(
            f"units of {length or 'several lengths'} tokens in {part.prefix[:-1]}, where the exported step has {part.length}: export with "
            "example=state, a state like this one"
        )
    if length and not part.length:
        units = int(numbers[COUNT])
        edges = int(numbers[START]) + length * torch.arange(units + 1, dtype=torch.int32, device="cpu")
        sizes = torch.full((1, units), length, dtype=torch.int32, device="cpu")
        given = {**given, BOUNDS: edges[None], "lengths": sizes}
        numbers[ROOM] *= length
        numbers[START] = 0
    place = torch.arange(waiting, dtype=torch.int32, device="cpu")[None]
    if "places.order" in part.local and "places.order" not in given:
        given = {**given, "places.order": place}
    if "places.where" in part.local and "places.where" not in given:
        given = {**given, "places.where": place + int(numbers[SHIFT])}
        numbers[SHIFT] = 0
    return given


def _retrieval(layout: Layout, row: RowMemory, ahead: int, index: int) -> dict[str, Tensor]:
    """What the retrieval head remembers, with room for `ahead` more keys."""
    assert layout.selection is not None
    if row.exact:
        raise StateError(
            f"row {index} is short, so that the retrieval head has not read it: let it outgrow the budget's floor, or floor=0"
        )
    if len(row.notes[UNREAD]):
        raise StateError(
            f"row {index} read several tokens in its last step: let it read one more, by compiled.step or extend"
        )
    keys = torch.cat([row.notes[KEYS], row.notes[f"{KEYS}{NEWEST}"]], 1)
    found = {KEYS: torch.nn.functional.pad(keys, (0, 0, 0, ahead))}
    for site in layout.selection.section.feature_sites:
        found[f"features.{site}"] = row.notes[f"features.{site}"][-1].float()
    return found


def _sized(field: Field) -> list[tuple[str, int]]:
    """The sizes of a row's tensor that may differ: symbols, and which dimension each is of."""
    return [(told, dim) for dim, told in enumerate(field.shape[1:]) if isinstance(told, str)]


def _stacked(field: Field, rows: list[Tensor], sizes: Mapping[str, int]) -> Tensor:
    """Tensors [...] of each row -> [B, ...], padded to the sizes."""
    shape = list(rows[0].shape)
    for told, dim in _sized(field):
        size, _, more = told.partition(" + ")
        shape[dim] = sizes[size] + int(more or 0)
    out = torch.full((len(rows), *shape), field.fill, dtype=field.dtype, device="cpu")
    for own, x in zip(out, rows):
        own[tuple(slice(size) for size in x.shape)] = x
    return out


__all__ = ["Rows", "rows_of"]
