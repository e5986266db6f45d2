"""Where folded tokens wait: raw, quantised to 8 or 4 bits, or as low-rank factors, in host memory, in a mapped file or on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from semkv.kernels.codes import rebuilt
from semkv.kernels.gather.cpp import copies_tokens, copy_tokens_cpp
from semkv.kernels.mixed_attention.call import DTYPES
from semkv.runtime.host.tier import HostTier, on_disk
from semkv.runtime.store.quantization import CODE_BITS, code_width, quantize

Form = Literal["raw", "int8", "int4"]

RoomKinds = tuple[tuple[int, torch.dtype], ...]
"""Numbers per token and their dtype, of each tensor of a room for tokens: keys and values, and where those are codes their
scales."""


def room_kinds(key_dim: int, value_dim: int, dtype: torch.dtype, form: str) -> RoomKinds:
    """Of rooms that hold tokens in a form: numbers of `dtype`, or codes."""
    bits = CODE_BITS.get(form)
    if bits is None:
        return (key_dim, dtype), (value_dim, dtype)
    widths = [(code_width(dim, bits), torch.uint8) for dim in (key_dim, value_dim)]
    return (*widths, (1, torch.float16), (1, torch.float16))


AHEAD = 256
"""Tokens that a tensor on the device is made larger at a time."""
PIECE = 4096
"""Tokens that PyTorch gathers at a time where nothing crosses a link: what they are on the way fits the caches, and takes no memory
that grows with the step."""
ROOM = 8
"""A prompt's tokens are given room for one in `ROOM` more: the first ones that are folded later do not copy all of them."""


class GrowingTensor:
    """A tensor [H, n, ...] that grows along its second dimension, in memory or in a file mapped into it.

    tier: what makes it; None: memory of the host. device: where it is instead; None: in the tier. expected: the length that the
    first tokens are given room for.
    """

    def __init__(
        self,
        heads: int,
        tail: tuple[int, ...],
        dtype: torch.dtype,
        *,
        tier: HostTier | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.length = self.expected = 0
        self.tier, self.device = HostTier() if tier is None else tier, device
        self._tail = tail
        self._data = torch.empty((heads, 0, *tail), dtype=dtype, device=device)

    @property
    def stored(self) -> Tensor:
        """`data` with the room behind it."""
        return self._data

    @property
    def data(self) -> Tensor:
        return self._data[:, : self.length]

    def rows(self, heads: Tensor, index: Tensor) -> Tensor:
        """`data[heads, index]` for int64 indices of one shape: whole rows are copied, which is faster than indexing."""
        data = self._data  # another thread may append meanwhile, and put a larger one in its place
        flat = (heads * data.shape[1] + index).flatten().to(data.device)
        return data.flatten(0, 1).index_select(0, flat).unflatten(0, index.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        return self.data.numel() * self._data.element_size()

    @property
    def reserved_nbytes(self) -> int:
        """Bytes allocated ahead of need."""
        return self._data.nbytes - self.nbytes

    @property
    def disk_nbytes(self) -> int:
        """Those of them that are in a file."""
        return self.nbytes if self.device is None and on_disk(self._data) else 0

    def _allocate(self, capacity: int) -> None:
        shape, dtype = (self._data.shape[0], capacity, *self._tail), self._data.dtype
        if self.device is not None:
            fresh = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            fresh = self.tier.empty(shape, dtype, scattered=True)
        fresh[:, : self.length] = self.data
        self._data = fresh

    def append(self, x: Tensor) -> None:
        """Add x [H, t, ...]."""
        end = self.length + x.shape[1]
        if end > self._data.shape[1]:
            ahead = self._data.shape[1] * 5 // 4
            if self.device is not None:
                ahead = min(ahead, self.length + AHEAD)
            if self.length == 0:
                counted = (
                    self.device is not None or self.tier.limit is not None
                )  # bytes that nothing fills yet count there
                ahead = self.expected if counted else self.expected + self.expected // ROOM
            self._allocate(max(end, ahead))
        room = self._data[:, self.length : end]
        if x.device == room.device:
            room.copy_(x)
        else:  # head by head: a copy between devices that is not contiguous on both sides is staged
            for own, new in zip(room, x):
                own.copy_(new)
        self.length = end

    def clone(self) -> GrowingTensor:
        return self.moved(self.device)

    def moved(self, device: torch.device | None) -> GrowingTensor:
        """A copy on `device`; on the host where it is None."""
        copy = GrowingTensor(self._data.shape[0], self._tail, self._data.dtype, tier=self.tier, device=device)
        copy.append(self.data)
        return copy


class HostTokens:
    """Folded tokens' keys and values per KV head, in order, raw in the KV dtype or as codes of 8 or 4 bits with scales."""

    def __init__(
        self,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        form: Form,
        *,
        tier: HostTier | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.form = form
        self.dtype, self.dims = dtype, {"k": key_dim, "v": value_dim}
        kinds = zip(("k", "v", "k_scale", "v_scale"), room_kinds(key_dim, value_dim, dtype, form))
        self.parts = {
            name: GrowingTensor(heads, (width,), stored, tier=tier, device=device) for name, (width, stored) in kinds
        }

    @property
    def length(self) -> int:
        return self.parts["k"].length

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def disk_nbytes(self) -> int:
        """Those of them that are in files."""
        return sum(part.disk_nbytes for part in self.parts.values())

    @cached_property
    def token_nbytes(self) -> int:
        """Bytes that one token of one KV head takes here, and on the way to the device."""
        return sum(part.stored.element_size() * part._tail[0] for part in self.parts.values())

    @property
    def in_place(self) -> bool:
        """Whether a kernel of a GPU reads what waits at its own address: that is in page-locked memory, in a dtype that the kernel has."""
        return self.dtype in DTYPES and self.locked

    @property
    def locked(self) -> bool:
        """Whether all of it is in page-locked memory of the host."""
        return all(part.tier.pinned and part.device is None and part.stored.is_pinned() for part in self.parts.values())

    def expect(self, tokens: int) -> None:
        """`tokens` tokens are on their way, in several parts: the first makes room for all."""
        for part in self.parts.values():
            part.expected = tokens

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add k [Hkv, t, D] and v [Hkv, t, Dv], from whichever device they are on."""
        if self.form == "raw":
            self.parts["k"].append(k.to(self.dtype))
            self.parts["v"].append(v.to(self.dtype))
            return
        for name, x in (("k", k), ("v", v)):
            packed = quantize(x, CODE_BITS[self.form])
            self.parts[name].append(packed.codes)
            self.parts[f"{name}_scale"].append(packed.scale)

    def gather(self, index: Tensor, heads: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Tokens by place: index int64 [Hkv, s] -> k [Hkv, s, D], v [Hkv, s, Dv] in the KV dtype.

        With `heads` int64 [s], index is [s], a place in each of those heads, and the result has no head dimension. Indices
        are on the CPU; the result is where the tokens wait.
        """
        heads = torch.arange(index.shape[0], dtype=torch.int64, device="cpu")[:, None] if heads is None else heads
        return self._rows("k", heads, index), self._rows("v", heads, index)

    def keys(self, head: int, places: Tensor) -> Tensor:
        """Keys [s, D] of one head by place, int64 [s] on the CPU, in the KV dtype and where they wait."""
        return self._rows("k", torch.full_like(places, head), places)

    def _rows(self, name: str, heads: Tensor, index: Tensor) -> Tensor:
        rows = self.parts[name].rows(heads, index)
        if self.form == "raw":
            return rows
        scale = self.parts[f"{name}_scale"].rows(heads, index)
        return rebuilt(rows, scale, CODE_BITS[self.form], self.dims[name]).to(self.dtype)

    def fill(
        self, rooms: Sequence[Tensor], at: Tensor, index: Tensor, heads: Tensor, *, threads: int | None = None
    ) -> None:
        """Copy the tokens at places `index` int64 [n] of KV heads `heads` to rows `at` int64 [n] of `rooms`. Codes go to rooms for codes as
        they are, and become numbers in rooms for numbers."""
        parts, numbers = self.parts, len(rooms) == 2
        names = ("k", "v") if numbers else ("k", "v", "k_scale", "v_scale")
        waiting = [parts[name].stored for name in names]
        scales = [parts[f"{name}_scale"].stored if numbers and f"{name}_scale" in parts else None for name in names]
        if copies_tokens(waiting, scales, rooms):
            copy_tokens_cpp(waiting, scales, rooms, heads, index, at, threads=threads)
            return
        device, count = rooms[0].device, len(at)
        if device.type == "cuda" and self.in_place:
            from semkv.kernels.gather.triton import copy_tokens_triton

            copy_tokens_triton(waiting, scales, rooms, heads, index, at)
            return
        size = PIECE if device.type == "cpu" else max(1, count)
        for piece in (slice(start, start + size) for start in range(0, count, size)):
            places, own = index[piece], heads[piece]
            new = self.gather(places, own) if numbers else [parts[name].rows(own, places) for name in names]
            if numbers and new[0].device != device:  # they cross the link as one tensor
                new = torch.cat(tuple(new), 1).to(device).split([x.shape[1] for x in new], 1)
            rows = at[piece].to(device)
            for room, x in zip(rooms, new):
                room.index_copy_(0, rows, x.to(device))

    def moved(self, device: torch.device | None) -> HostTokens:
        """A copy on `device`; on the host where it is None."""
        copy = object.__new__(HostTokens)
        copy.form, copy.dtype, copy.dims = self.form, self.dtype, self.dims
        copy.parts = {name: part.moved(device) for name, part in self.parts.items()}
        return copy

    def clone(self) -> HostTokens:
        return self.moved(self.parts["k"].device)


class HostFactors:
    """Low-rank factors of folded spans, each KV head with its own ranks, packed without padding.

    Keys of span f and head h are (U * s) V^T with U [L, r], s [r], V [D, r]; values likewise with their own rank. numbers: [1, n], those of
    a span and head one after the other, in the order of `KINDS`, from offsets int64 [Hkv, F] on; ranks int64 [Hkv, F]; lengths int64 [F].
    """

    KINDS = ("key_u", "key_s", "key_v", "value_u", "value_s", "value_v")

    def __init__(
        self,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        *,
        tier: HostTier | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.heads, self.key_dim, self.value_dim, self.dtype = heads, key_dim, value_dim, dtype
        self.numbers = GrowingTensor(1, (), dtype, tier=tier, device=device)
        self.offsets = torch.zeros(heads, 0, dtype=torch.int64, device="cpu")
        self.key_rank = torch.zeros(heads, 0, dtype=torch.int64, device="cpu")
        self.value_rank = torch.zeros(heads, 0, dtype=torch.int64, device="cpu")
        self.lengths = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._largest: tuple[int, int, int] | None = None

    @property
    def spans(self) -> int:
        return self.lengths.shape[0]  # len() of a tensor is a call of Python, and every layer of a step asks

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + sum(x.nbytes for x in (self.offsets, self.key_rank, self.value_rank, self.lengths))

    def sizes(self) -> dict[str, Tensor]:
        """By kind, how many numbers each span has, int64 [Hkv, F]."""
        found: dict[str, Tensor] = {}
        for side, rank, dim in (("key", self.key_rank, self.key_dim), ("value", self.value_rank, self.value_dim)):
            found |= {f"{side}_u": rank * self.lengths, f"{side}_s": rank, f"{side}_v": rank * dim}
        return found

    @property
    def largest(self) -> tuple[int, int]:
        """Tokens of the longest span, and the largest rank."""
        if self._largest is None or self._largest[0] != self.spans:
            rank = max(int(x.max()) for x in (self.key_rank, self.value_rank))
            self._largest = (self.spans, int(self.lengths.max()), rank)
        return self._largest[1:]

    def span_nbytes(self) -> Tensor:
        """int64 [Hkv, F]: bytes of each span's factors, here, on the way and on the device."""
        return torch.stack(list(self.sizes().values())).sum(0) * self.dtype.itemsize

    def append(self, factors: list[list[dict[str, Tensor]]], lengths: Tensor) -> None:
        """Add spans: `factors[head][span]` holds the six tensors of `KINDS`; lengths int64 [F]."""
        flat = [
            torch.cat([span[kind].to(self.dtype).flatten() for kind in self.KINDS]) for row in factors for span in row
        ]
        sizes = torch.tensor([part.numel() for part in flat], dtype=torch.int64, device="cpu")
        offsets = (self.numbers.length + sizes.cumsum(0) - sizes).view(self.heads, -1)
        self.numbers.append(torch.cat(flat)[None])
        self.offsets = torch.cat([self.offsets, offsets], dim=1)
        ranks = [
            torch.tensor([[span[kind].numel() for span in row] for row in factors], dtype=torch.int64, device="cpu")
            for kind in ("key_s", "value_s")
        ]
        self.key_rank = torch.cat([self.key_rank, ranks[0]], dim=1)
        self.value_rank = torch.cat([self.value_rank, ranks[1]], dim=1)
        self.lengths = torch.cat([self.lengths, lengths])

    def padded(self, spans: Tensor) -> tuple[int, int]:
        """The largest rank and length among `spans` int64 [Hkv, F] (-1 pads), at least 1."""
        if not spans.numel():
            return 1, 1
        safe, present = spans.clamp(min=0), spans >= 0
        largest = torch.maximum(self.key_rank, self.value_rank).gather(1, safe)
        rank, longest = (int(torch.where(present, x, 0).max()) for x in (largest, self.lengths[safe]))
        return max(1, rank), max(1, longest)

    def gather(self, spans: Tensor, skip: Tensor | None = None) -> dict[str, Tensor]:
        """Factors of `spans` int64 [Hkv, F] (-1 pads), padded with zeros to the largest length and ranks among them.

        Those where `skip` bool [Hkv, F] are not read: their place stays zero. Returns the six tensors of `KINDS`, shaped as
        in `semkv.ir.memory.Entries` without the batch dimension; keys and
        values share one rank dimension R.
        """
        present, (rank, longest) = spans >= 0, self.padded(spans)
        ranks = {"key": self.key_rank, "value": self.value_rank}
        read = torch.nonzero(present if skip is None else present & ~skip, as_tuple=True)
        head, span = read[0], spans[read]
        length = self.lengths[span][:, None, None]
        column = torch.arange(rank, dtype=torch.int64, device="cpu")
        out, flat, begins = {}, self.numbers.data[0], self.offsets
        for kind, size in self.sizes().items():
            side, start = kind.split("_")[0], begins[head, span][:, None, None]
            own, begins = ranks[side][head, span][:, None, None], begins + size
            rows = {"u": longest, "s": 1, "v": self.key_dim if side == "key" else self.value_dim}[kind[-1]]
            row = torch.arange(rows, dtype=torch.int64, device="cpu")[:, None]
            valid = column < own
            valid = valid & (row < length) if kind.endswith("_u") else valid.expand(-1, rows, -1)
            index = torch.where(valid, start + row * own + column, 0)
            made = torch.where(valid.to(flat.device), flat[index], flat.new_zeros(()))
            out[kind] = flat.new_zeros((*spans.shape, rows, rank)).index_put_(
                tuple(x.to(flat.device) for x in read), made
            )
            out[kind] = out[kind].squeeze(2) if kind.endswith("_s") else out[kind]
        return out

    def clone(self) -> HostFactors:
        return self.moved(self.numbers.device)

    def moved(self, device: torch.device | None) -> HostFactors:
        """A copy whose factors are on `device`, or on the host where it is None; its tables stay there."""
        copy = HostFactors(self.heads, self.key_dim, self.value_dim, self.dtype)
        copy.numbers, copy.offsets = self.numbers.moved(device), self.offsets.clone()
        copy.key_rank, copy.value_rank = self.key_rank.clone(), self.value_rank.clone()
        copy.lengths = self.lengths.clone()
        return copy


__all__ = ["Form", "GrowingTensor", "HostFactors", "HostTokens"]
