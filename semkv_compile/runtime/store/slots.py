"""Slots of a layer's own for unfolded tokens, which a step's graph fills: what is chosen again stays where it is."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from semkv.ir import state_ops
from semkv.ir.state_ops import EMPTY
from semkv.kernels.state.reference import unfold_reference
from semkv.runtime.host.pool import RoomKinds
from semkv.runtime.store.quantization import Quantized
from semkv.runtime.store.roomy import room_for
from semkv.runtime.views import UnitsView

NAMES = ("k", "v", "k_scale", "v_scale")


class Slots:
    """On the device, rooms [Hkv, C, ...] of the given kinds, by name, positions int32 [Hkv, C], `EMPTY` where a slot holds nothing; and
    which place's token each holds, int32 [Hkv, C], -1 where none.

    tensors: all of these by name; another dict where their number is another. filled: tokens that the last step held, over all heads.
    """

    def __init__(self, heads: int, kinds: RoomKinds, device: torch.device) -> None:
        self.heads, self.filled = heads, 0
        self.tensors = {
            name: torch.zeros(heads, 0, dim, dtype=dtype, device=device) for name, (dim, dtype) in zip(NAMES, kinds)
        }
        for name in ("positions", "places"):
            self.tensors[name] = torch.zeros(heads, 0, dtype=torch.int32, device=device)
        self._token_nbytes = sum(dim * dtype.itemsize for dim, dtype in kinds) + 8

    @property
    def k(self) -> Tensor | Quantized:
        """Keys [Hkv, C, D]."""
        return self._numbers("k")

    @property
    def v(self) -> Tensor | Quantized:
        """Values [Hkv, C, Dv]."""
        return self._numbers("v")

    def _numbers(self, name: str) -> Tensor | Quantized:
        x, scale = self.tensors[name], self.tensors.get(f"{name}_scale")
        return x if scale is None else Quantized(x, scale, 8, x.shape[-1])

    @property
    def positions(self) -> Tensor:
        return self.tensors["positions"]

    @property
    def places(self) -> Tensor:
        return self.tensors["places"]

    @property
    def rooms(self) -> list[Tensor]:
        """Those of keys and values, in the order of their kinds."""
        return [self.tensors[name] for name in NAMES if name in self.tensors]

    @property
    def nbytes(self) -> int:
        """Device bytes of the slots, empty ones included."""
        return self.heads * self.positions.shape[1] * self._token_nbytes

    def allow(self, slots: int) -> None:
        """Have so many slots per head in the next step; they hold as much as fits of what they held."""
        if self.positions.shape[1] != slots:
            self._resize(slots)

    def _resize(self, slots: int) -> None:
        """What is held first, and as much as fits."""
        have = self.positions.shape[1]
        order = (self.places < 0).to(torch.uint8).argsort(dim=1, stable=True)[:, : min(slots, have)]
        fresh = {name: x.new_zeros(x.shape[0], slots, *x.shape[2:]) for name, x in self.tensors.items()}
        fresh["positions"].fill_(EMPTY)
        fresh["places"].fill_(-1)
        firsts = have * torch.arange(self.heads, dtype=torch.int64, device=order.device)
        rows = (order + firsts[:, None]).flatten()  # among the slots of all heads
        for name, x in self.tensors.items():
            kept = x.flatten(0, 1).index_select(0, rows)  # whole rows, which `gather` copies number by number
            fresh[name][:, : order.shape[1]] = kept.unflatten(0, order.shape)
        self.tensors = fresh

    def hold(self, chosen: Tensor, spans: UnitsView) -> tuple[int, int]:
        """Hold exactly the tokens of the units chosen bool [Hkv, M], which there are slots for. Returns the tokens that were copied and
        those that were there, over all heads."""
        places = spans.places
        if spans.device is None and self.positions.device.type != "cpu":
            return self._hold_across(chosen, spans)
        waiting = spans.step_tensors()
        tables = {name: x for name, x in waiting.items() if name.startswith("places.")}
        chosen = pad(chosen, (0, room_for(spans.count) - spans.count))
        device = self.positions.device
        chosen = chosen.to(device)
        numbers = [torch.tensor([x], dtype=torch.int64, device=device) for x in (places.start, places.shift)]
        bounds, order, where = (tables.get(f"places.{name}") for name in ("bounds", "order", "where"))
        moved, held = unfold(
            {name: x[None] for name, x in self.tensors.items()},
            chosen[None],
            {name: waiting[f"waiting.{name}"][None] for name in NAMES if f"waiting.{name}" in waiting},
            numbers[0],
            numbers[1],
            places.length,
            None if bounds is None else bounds[None].to(device),
            None if order is None else order[None].to(device),
            None if where is None else where.to(device),
        )[0].tolist()
        self.filled = moved + held
        return moved, held

    def _hold_across(self, chosen: Tensor, spans: UnitsView) -> tuple[int, int]:
        """`hold` from memory of the host to another device: the host decides, and only what is missing crosses."""
        here = Slots(self.heads, ((0, torch.float32), (0, torch.float32)), torch.device("cpu"))
        here.tensors = {
            name: torch.zeros(self.heads, self.places.shape[1], 0, dtype=torch.float32, device="cpu")
            for name in NAMES[:2]
        }
        here.tensors |= {"positions": self.positions.cpu(), "places": self.places.cpu()}
        before = here.places.clone()
        nothing = torch.zeros(
            self.heads, spans.host_tokens.parts["k"].stored.shape[1], 0, dtype=torch.float32, device="cpu"
        )
        tables = spans.step_tensors()
        bounds, order, where = (tables.get(f"places.{name}") for name in ("bounds", "order", "where"))
        start, shift = (
            torch.tensor([x], dtype=torch.int64, device="cpu") for x in (spans.places.start, spans.places.shift)
        )
        moved, held = unfold_reference(
            here.tensors["k"][None],
            here.tensors["v"][None],
            here.positions[None],
            here.places[None],
            pad(chosen.cpu(), (0, room_for(spans.count) - spans.count))[None],
            nothing[None],
            nothing[None],
            start,
            shift,
            spans.places.length,
            bounds=None if bounds is None else bounds[None],
            order=None if order is None else order[None],
            where=where,
        )[0].tolist()
        heads, slots = torch.nonzero((here.places != before) & (here.places >= 0), as_tuple=True)
        at = (heads * before.shape[1] + slots).to(self.positions.device)
        spans.host_tokens.fill([room.flatten(0, 1) for room in self.rooms], at, here.places[heads, slots].long(), heads)
        self.positions.copy_(here.positions)
        self.places.copy_(here.places)
        self.filled = moved + held
        return moved, held

    def take(self, places: Tensor, spans: UnitsView) -> None:
        """Have slots, empty ones so far, for tokens that wait at `places` int32 [Hkv, C], -1 for none."""
        self._resize(places.shape[1])
        self.places.copy_(places)
        heads, slots = torch.nonzero(places >= 0, as_tuple=True)
        own = places[heads, slots].long()
        at = (heads * places.shape[1] + slots).to(self.positions.device)
        spans.host_tokens.fill([room.flatten(0, 1) for room in self.rooms], at, own, heads)
        found = spans.places
        known = own + found.shift if found.where is None else found.where[0, own].long()
        self.positions.flatten(0, 1).index_copy_(0, at, known.to(torch.int32).to(at.device))
        self.filled = len(own)

    def forget(self) -> None:
        """Nothing is held."""
        self.positions.fill_(EMPTY)
        self.places.fill_(-1)

    def clone(self) -> Slots:
        """An independent copy."""
        copy = object.__new__(Slots)
        copy.__dict__.update(self.__dict__)
        copy.tensors = {name: x.clone() for name, x in self.tensors.items()}
        return copy


def unfold(
    slots: dict[str, Tensor],
    chosen: Tensor,
    waiting: dict[str, Tensor],
    start: Tensor,
    shift: Tensor,
    length: int,
    bounds: Tensor | None,
    order: Tensor | None,
    where: Tensor | None,
) -> Tensor:
    """`semkv::unfold_` of tensors by name."""
    return state_ops.unfold_(
        slots["k"],
        slots["v"],
        slots["positions"],
        slots["places"],
        chosen,
        waiting["k"],
        waiting["v"],
        start,
        shift,
        length,
        slots.get("k_scale"),
        slots.get("v_scale"),
        waiting.get("k_scale"),
        waiting.get("v_scale"),
        bounds,
        order,
        where,
    )


__all__ = ["Slots", "unfold"]
