"""Where a layer's unfolded tokens stay between steps: slots that are written in place, so that only what is missing moves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from semkv.kernels.slots import EMPTY, Segments, assign_slots, extent, release_slots
from semkv.runtime.host_pool import RoomKinds
from semkv.runtime.prefetch import Source
from semkv.runtime.quantization import Quantized

ROUND, ROUND_FROM = 64, 1024
"""Slots that a workspace of at least `ROUND_FROM` grows and shrinks by."""


@dataclass
class UnfoldedFactors:
    """Factored spans on the device, per KV head, padded: `parts` as `HostFactors.gather`, ids int64 [Hkv, F] (-1 pads), positions
    int32 [Hkv, F, L], unit int64 [Hkv, F]. moved_nbytes: what crossed the link for it; held_nbytes: what was there."""

    parts: dict[str, Tensor]
    ids: Tensor
    positions: Tensor
    unit: Tensor
    moved_nbytes: int
    held_nbytes: int

    @property
    def tensors(self) -> list[Tensor]:
        """What is on the device."""
        return [*self.parts.values(), self.positions]

    @property
    def nbytes(self) -> int:
        """Device bytes, padding included."""
        return sum(x.nbytes for x in self.tensors)


class Workspace:
    """Slots for tokens, per KV head, and factored spans.

    On the device: rooms [Hkv, slots, ...] of the given kinds, positions int32 [Hkv, slots], `EMPTY` where a slot holds nothing; what
    stands there is finite. On the host, what is where: tokens int64 [Hkv, slots], places in the host tier, and segment int64
    [Hkv, slots], both -1 where empty; held bool [Hkv, S], the segments that are there, whole (of later ones, none); and where the
    device is another, the positions again: they are kept there and sent over as a whole.
    filled: tokens that the last step held, over all heads.
    """

    def __init__(self, heads: int, kinds: RoomKinds, device: torch.device) -> None:
        self.rooms = [torch.zeros(heads, 0, dim, dtype=dtype, device=device) for dim, dtype in kinds]
        self.positions = torch.zeros(heads, 0, dtype=torch.int32, device=device)
        self._positions = self.positions if device.type == "cpu" else self.positions.cpu()
        self.tokens = torch.zeros(heads, 0, dtype=torch.int64, device="cpu")
        self.segment = torch.zeros(heads, 0, dtype=torch.int64, device="cpu")
        self.held = torch.zeros(heads, 0, dtype=torch.bool, device="cpu")
        self.factors: UnfoldedFactors | None = None
        self.filled = 0

    @property
    def k(self) -> Tensor | Quantized:
        """Keys [Hkv, slots, D]."""
        return self._numbers(0)

    @property
    def v(self) -> Tensor | Quantized:
        """Values [Hkv, slots, Dv]."""
        return self._numbers(1)

    def _numbers(self, place: int) -> Tensor | Quantized:
        x = self.rooms[place]
        return x if len(self.rooms) == 2 else Quantized(x, self.rooms[place + 2], 8, x.shape[-1])

    @property
    def slots(self) -> int:
        """Slots per KV head."""
        return self.segment.shape[1]

    @property
    def extent(self) -> int:
        """One more than the last slot that any head uses."""
        return extent(self.segment)

    @property
    def tensors(self) -> list[Tensor]:
        """What is on the device."""
        own = [*self.rooms, self.positions]
        return own if self.factors is None else [*own, *self.factors.tensors]

    @property
    def nbytes(self) -> int:
        """Device bytes, empty slots and padding included."""
        return sum(x.nbytes for x in self.tensors)

    def take(self, wanted: Tensor, segments: Segments, host: Source, slots: int | None = None) -> tuple[int, int]:
        """Hold exactly the segments `wanted` bool [Hkv, S], each head its own: what is missing is fetched from `host` into slots
        whose tokens are not wanted any more.

        slots: per KV head, which the wanted segments of any head fit into; None: as many as they need. `wanted` is kept, and must not be
        written to. Returns the tokens that were fetched and those that were there, over all heads.
        """
        kept, lacking = release_slots(wanted, self.held, segments, self.segment, self.tokens, self._positions)
        self._resize(int((kept + lacking).max()) if slots is None else slots)
        if bool((kept + lacking > self.slots).any()):
            raise RuntimeError(
                f"segments of {(kept + lacking).tolist()} tokens per KV head for {self.slots} slots; choose what fits"
            )
        at, heads, places, positions = assign_slots(wanted, self.held, segments, self.segment, self.tokens, lacking)
        self.held, self.filled = wanted, int((kept + lacking).sum())
        self._fetch(at, heads, places, positions, host)
        return len(at), int(kept.sum())

    def lay_out(self, tokens: Tensor, segment: Tensor, segments: Segments, host: Source) -> None:
        """Hold, in an empty workspace, what `tokens` and `segment` of another say, in the same slots, from `host`."""
        self._resize(tokens.shape[1])
        self.tokens, self.segment = tokens.clone(), segment.clone()
        heads, slots = torch.nonzero(segment >= 0, as_tuple=True)
        own, places = segment[heads, slots], tokens[heads, slots]
        self.held = torch.zeros(len(segment), len(segments.length), dtype=torch.bool, device="cpu")
        self.held[heads, own] = True
        positions = segments.position[own] + places - segments.start[own]
        self._fetch(heads * self.slots + slots, heads, places, positions, host)

    def _fetch(self, at: Tensor, heads: Tensor, places: Tensor, positions: Tensor, host: Source) -> None:
        """Fill the places `at` int64 [n] of the slots of all heads, which are of `heads`, with the tokens that wait at `places`."""
        host.fill([room.flatten(0, 1) for room in self.rooms], at, places, heads)
        self._positions.flatten(0, 1).index_copy_(0, at, positions.to(torch.int32))
        self._send()

    def _send(self) -> None:
        """Have the device's positions be the host's."""
        if self.positions is self._positions:
            return
        pinned = self.positions.is_cuda and torch.cuda.is_available()
        here = (
            self._positions.pin_memory() if pinned else self._positions
        )  # a copy, which nothing writes to while it is sent
        self.positions.copy_(here, non_blocking=pinned)

    def renumber(self, gone: int) -> None:
        """The first `gone` segments are no more, and the others' numbers are smaller by as many."""
        wanted = torch.cat([torch.zeros_like(self.held[:, :gone]), self.held[:, gone:]], 1)
        none = torch.zeros(self.held.shape[1], dtype=torch.int64, device="cpu")  # nothing is missing
        release_slots(wanted, self.held, Segments(none, none, none), self.segment, self.tokens, self._positions)
        self._send()
        self.segment = torch.where(self.segment >= 0, self.segment - gone, -1)
        self.held = self.held[:, gone:].clone()

    def _resize(self, slots: int) -> None:
        """Have `slots` slots per head, moving what is held to the front where that is fewer than now."""
        more = slots - self.slots
        if more > 0:
            self.tokens, self.segment = (pad(x, (0, more), value=-1) for x in (self.tokens, self.segment))
            self._move_positions(pad(self._positions, (0, more), value=EMPTY))
            for place, room in enumerate(
                self.rooms
            ):  # one after the other: one of them is twice there meanwhile, not all
                self.rooms[place] = pad(room, (0, 0, 0, more))
        elif more < 0:
            order = (self.segment < 0).to(torch.uint8).argsort(dim=1, stable=True)[:, :slots]
            self.tokens, self.segment = (x.gather(1, order) for x in (self.tokens, self.segment))
            self._move_positions(self._positions.gather(1, order))
            order = order.to(self.positions.device)
            for place, room in enumerate(self.rooms):
                self.rooms[place] = room.gather(1, order[..., None].expand(-1, -1, room.shape[2]))

    def _move_positions(self, positions: Tensor) -> None:
        """Have `positions` of the host in the place of those that were there."""
        device, self._positions = self.positions.device, positions
        self.positions = positions if device.type == "cpu" else positions.to(device)

    def clone(self) -> Workspace:
        """An independent copy."""
        copy = object.__new__(Workspace)
        copy.factors, copy.filled = self.factors, self.filled  # factors are replaced, never written in place
        copy.rooms = [room.clone() for room in self.rooms]
        for name in ("tokens", "segment", "held"):
            setattr(copy, name, getattr(self, name).clone())
        copy.positions = self.positions  # for its device
        copy._move_positions(self._positions.clone())
        return copy


def slots_within(tokens: float, stored: int) -> int:
    """Slots per KV head for an allowance of `tokens` tokens, of which there are `stored`: the allowance, rounded down where it is
    large, so that a workspace changes its size only every few steps."""
    most = -(-stored // ROUND) * ROUND
    if tokens >= most:
        return most
    return int(tokens) // ROUND * ROUND if tokens >= ROUND_FROM else int(tokens)


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The places [start, start + length) of every range, one after the other, int64."""
    ends = lengths.cumsum(0)
    shift = (starts - ends + lengths).repeat_interleave(lengths)
    return shift + torch.arange(len(shift), dtype=torch.int64, device="cpu")
