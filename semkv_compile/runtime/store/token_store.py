"""Exact tokens on one device, in pages: at full resolution, or in 8 or 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from semkv.ir.state_ops import EMPTY
from semkv.runtime.store.quantization import Quantized, dequantize, quantize
from semkv.runtime.store.roomy import room_for


def plain(x: Tensor | Quantized) -> Tensor:
    """The numbers that `x` holds or stands for; float32 in the latter case."""
    return dequantize(x) if isinstance(x, Quantized) else x


PAGES_AHEAD = 4
"""Pages that a store without a budget has room for at a time, at least."""


class TokenStore:
    """Keys [Hkv, n, D], values [Hkv, n, Dv] and positions [Hkv|1, n] of exact tokens, grown a page at a time.

    Given as `Quantized`, keys and values are held as codes, a scale per token and KV head beside them, and so are those that
    are appended. Positions have one row per KV head where heads hold different tokens, else one for all. `scores` float32 [Hkv, n] stand
    beside tokens that are scored (`semkv.runtime.components.Evictor`); appended ones begin with 0. `once`: how much of one row of positions
    counts here, where processes share the heads (`AttentionSite.once`). `reserve` asks for
    geometric growth, for stores without a cap: then buffers are ahead of what is occupied, and `nbytes` counts what is
    occupied.
    """

    def __init__(
        self,
        k: Tensor | Quantized,
        v: Tensor | Quantized,
        positions: Tensor,
        page_size: int,
        *,
        reserve: bool = False,
        scores: Tensor | None = None,
        once: float = 1,
    ) -> None:
        self.page_size = page_size
        self.reserve = reserve
        self.bits = k.bits if isinstance(k, Quantized) else None
        """Of codes; None: numbers."""
        self.dims = {name: x.dim if isinstance(x, Quantized) else x.shape[-1] for name, x in (("k", k), ("v", v))}
        given = {**_parts("k", k), **_parts("v", v), "positions": positions.to(torch.int32)}
        if scores is not None:
            given["scores"] = scores.float()
        self.length = given["k"].shape[1]
        self.token_nbytes = sum(x.shape[0] * x.shape[2:].numel() * x.itemsize for x in given.values())
        self.kv_nbytes = self.token_nbytes - sum(
            4 * given[name].shape[0] for name in ("positions", "scores") if name in given
        )
        if once != 1:
            self.token_nbytes -= 4 * (1 - once)  # type: ignore[assignment]  # parts of bytes, among processes
        capacity = self._pages(self.length) * page_size
        self._held = {name: _grown(name, x, capacity) for name, x in given.items()}
        self._ahead = False
        self.held = 0
        """Tokens in all for which there is room, where it was made ahead; 0 where it was not."""

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _numbers(self, name: str) -> Tensor | Quantized:
        x = self._held[name][:, : self.length]
        if self.bits is None:
            return x
        return Quantized(x, self._held[f"{name}_scale"][:, : self.length], self.bits, self.dims[name])

    @property
    def k(self) -> Tensor | Quantized:
        return self._numbers("k")

    @property
    def v(self) -> Tensor | Quantized:
        return self._numbers("v")

    @property
    def positions(self) -> Tensor:
        return self._held["positions"][:, : self.length]

    @property
    def scores(self) -> Tensor | None:
        return self._held["scores"][:, : self.length] if "scores" in self._held else None

    @property
    def buffers(self) -> list[Tensor]:
        """The tensors behind it, of whole pages."""
        return list(self._held.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the occupied pages, and of those that are held. token_nbytes: of a token in all heads; kv_nbytes: of its keys and values
        alone."""
        return self._pages(max(self.length, self.held)) * self.page_size * self.token_nbytes

    @property
    def reserved_nbytes(self) -> int:
        """Bytes allocated ahead of need."""
        return sum(x.nbytes for x in self.buffers) - self.nbytes

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What a step's graph reads and writes, by name; behind the tokens are zeros, and positions that hide them."""
        return self._held

    def reserve_one(self) -> None:
        """Have a place for one more token, which a step's graph fills in."""
        self._ahead = True
        if self._held["k"].shape[1] != self._with_one_more():
            self._grow(self._with_one_more())

    def hold(self, tokens: int) -> None:
        """Have room for so many more tokens from now on, which counts as occupied; 0: for none."""
        self.held = self.length + tokens if tokens else 0
        if self.held:
            self.reserve_one()

    def _with_one_more(self) -> int:
        """Places of a step's graph: the number of tokens alone says how many, or the tokens that are held."""
        pages = self._pages(max(self.length + 1, self.held))
        if self.reserve:
            pages = room_for(-(-pages // PAGES_AHEAD) * PAGES_AHEAD)
        return pages * self.page_size

    def take_in(self, tokens: int = 1) -> None:
        """Count tokens in that were filled in."""
        self.length += tokens

    def _grow(self, capacity: int) -> None:
        self._held = {name: _grown(name, x[:, : self.length], capacity) for name, x in self._held.items()}

    def append(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Add tokens: k [Hkv, t, D], v [Hkv, t, Dv], of any dtype, positions [Hkv|1, t]."""
        end = self.length + k.shape[1]
        capacity = self._held["k"].shape[1]
        if end > capacity:
            wanted = max(end, capacity * 5 // 4) if self.reserve else end
            self._grow(self._pages(wanted) * self.page_size)
        new = {"positions": positions}
        for name, x in (("k", k), ("v", v)):
            new |= _parts(name, x if self.bits is None else quantize(x, self.bits))
        for name, x in new.items():
            self._held[name][:, self.length : end] = x
        if "scores" in self._held:
            self._held["scores"][:, self.length : end] = 0
        self.length = end

    def pop_front(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Take the oldest `count` tokens out, as numbers; pages that fall empty are freed."""
        k, v = (
            dequantize(x[:, :count]) if isinstance(x, Quantized) else x[:, :count].clone() for x in (self.k, self.v)
        )
        positions = self.positions[:, :count].clone()
        before, self.length = self.length, self.length - count
        capacity = self._held["k"].shape[1]
        if self._ahead:
            capacity = self._with_one_more()
        elif not self.reserve:
            capacity = self._pages(self.length) * self.page_size
        if all(capacity == x.shape[1] for x in self._held.values()):  # then a recorded step finds them where they were
            for name, x in self._held.items():
                _shift(name, x, count, before)
        else:
            self._held = {name: _grown(name, x[:, count:before], capacity) for name, x in self._held.items()}
        return k, v, positions

    def clone(self) -> TokenStore:
        copy = TokenStore(self.k, self.v, self.positions, self.page_size, reserve=self.reserve, scores=self.scores)
        copy.hold(self.held - self.length if self.held else 0)
        return copy

    def to_tensors(self) -> dict[str, Tensor]:
        return {name: x[:, : self.length].contiguous() for name, x in self._held.items()}


def _parts(name: str, x: Tensor | Quantized) -> dict[str, Tensor]:
    return {name: x.codes, f"{name}_scale": x.scale} if isinstance(x, Quantized) else {name: x}


def _grown(name: str, x: Tensor, capacity: int) -> Tensor:
    """x [H, n, ...] with room up to `capacity`: zeros, and positions of no token."""
    out = x.new_empty((x.shape[0], capacity, *x.shape[2:]))
    out[:, : x.shape[1]] = x
    out[:, x.shape[1] :] = EMPTY if name == "positions" else 0
    return out


def _on_cpu(x: Tensor) -> bool:
    return type(x) is Tensor and x.is_cpu


def _shift(name: str, x: Tensor, count: int, length: int) -> None:
    """Move tokens `count` to `length` of x [H, capacity, ...] to its front. On a CPU by NumPy, which looks where sides overlap: tokens are
    few, and PyTorch's time would be that of its calls."""
    there: Any = x
    if _on_cpu(x):
        there = (x.view(torch.uint8) if x.dtype == torch.bfloat16 else x).numpy()
    moved = there[:, count:length]
    there[:, : length - count] = moved if _on_cpu(x) else moved.clone()
    there[:, length - count : length] = EMPTY if name == "positions" else 0


__all__ = ["TokenStore", "plain"]
