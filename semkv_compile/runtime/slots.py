"""Slots of a layer's own for unfolded tokens, which a step's graph fills: what is chosen again stays where it is."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.ir.state_ops import EMPTY
from semkv.runtime.host_pool import RoomKinds
from semkv.runtime.roomy import room_for

NAMES = ("k", "v", "k_scale", "v_scale")

class Slots:
    """On the device, rooms [Hkv, C, ...] of the given kinds, by name, positions int32 [Hkv, C], `EMPTY` where a slot holds nothing; and
    which place's token each holds, int32 [Hkv, C], -1 where none.

    usable: of the C slots, those that may be filled. filled: tokens that the last step held, over all heads.
    """

    def __init__(self, heads: int, kinds: RoomKinds, device: torch.device) -> None:
        self.heads, self.usable, self.filled = heads, 0, 0
        self.rooms = {
            name: torch.zeros(heads, 0, dim, dtype=dtype, device=device) for name, (dim, dtype) in zip(NAMES, kinds)
        }
        self.positions = torch.zeros(heads, 0, dtype=torch.int32, device=device)
        self.places = torch.zeros(heads, 0, dtype=torch.int32, device=device)
        self._token_nbytes = sum(dim * dtype.itemsize for dim, dtype in kinds) + 4

    @property
    def nbytes(self) -> int:
        """Device bytes of the usable slots, empty ones included."""
        return self.heads * self.usable * self._token_nbytes

    @property
    def reserved_nbytes(self) -> int:
        """Device bytes of the others."""
        return self.heads * self.positions.shape[1] * self._token_nbytes - self.nbytes

    def allow(self, usable: int) -> None:
        """Let so many slots per head be filled by the next step; those that are keep what they hold as far as they are not more."""
        self.usable, have = usable, self.positions.shape[1]
        if have != room_for(usable):
            self._resize(room_for(usable))

    def _resize(self, slots: int) -> None:
        """What is held first, and as much as fits."""
        have = self.positions.shape[1]
        order = (self.places < 0).to(torch.uint8).argsort(dim=1, stable=True)[:, : min(slots, have)]
        fresh = {name: x.new_zeros(x.shape[0], slots, *x.shape[2:]) for name, x in self.tensors().items()}
        fresh["positions"].fill_(EMPTY)
        fresh["places"].fill_(-1)
        for name, x in self.tensors().items():
            at = order if x.dim() == 2 else order[..., None].expand(-1, -1, x.shape[2])
            fresh[name][:, : order.shape[1]] = x.gather(1, at)
        self.positions, self.places = fresh.pop("positions"), fresh.pop("places")
        self.rooms = fresh

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return {**self.rooms, "positions": self.positions, "places": self.places}

    def forget(self) -> None:
        """Nothing is held."""
        self.positions.fill_(EMPTY)
        self.places.fill_(-1)

    def clone(self) -> Slots:
        """An independent copy."""
        copy = object.__new__(Slots)
        copy.__dict__.update(self.__dict__)
        copy.rooms = {name: x.clone() for name, x in self.rooms.items()}
        copy.positions, copy.places = self.positions.clone(), self.places.clone()
        return copy


__all__ = ["Slots"]
