"""Tokens at full resolution on one device, in pages."""

from __future__ import annotations

import torch
from torch import Tensor


class TokenStore:
    """Keys [Hkv, n, D], values [Hkv, n, Dv] and positions [Hkv|1, n] of exact tokens, grown a page at a time.

    Positions have one row per KV head where heads hold different tokens, else one for all. `scores` float32 [Hkv, n] stand
    beside tokens that are scored (`semkv.runtime.components.Evictor`); appended ones begin with 0. `reserve` asks for
    geometric growth, for stores without a cap: then buffers are ahead of what is occupied, and `nbytes` counts what is
    occupied.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        page_size: int,
        *,
        reserve: bool = False,
        scores: Tensor | None = None,
    ) -> None:
        self.page_size = page_size
        self.reserve = reserve
        self.length = k.shape[1]
        self.token_nbytes = sum(x.shape[0] * x.shape[2:].numel() * x.itemsize for x in (k, v)) + 4 * positions.shape[0]
        self.token_nbytes += 4 * k.shape[0] if scores is not None else 0
        capacity = self._pages(self.length) * page_size
        self._k, self._v, self._positions = (self._grown(x, capacity) for x in (k, v, positions.to(torch.int32)))
        self._scores = None if scores is None else self._grown(scores.float(), capacity)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _grown(self, x: Tensor, capacity: int) -> Tensor:
        out = x.new_empty((x.shape[0], capacity, *x.shape[2:]))
        out[:, : x.shape[1]] = x
        out[:, x.shape[1] :] = 0
        return out

    @property
    def k(self) -> Tensor:
        return self._k[:, : self.length]

    @property
    def v(self) -> Tensor:
        return self._v[:, : self.length]

    @property
    def positions(self) -> Tensor:
        return self._positions[:, : self.length]

    @property
    def scores(self) -> Tensor | None:
        return None if self._scores is None else self._scores[:, : self.length]

    @property
    def buffers(self) -> list[Tensor]:
        """The tensors behind it, of whole pages."""
        held = [self._k, self._v, self._positions]
        return held if self._scores is None else [*held, self._scores]

    @property
    def nbytes(self) -> int:
        """Bytes of the occupied pages."""
        tokens = self._pages(self.length) * self.page_size
        return tokens * self.token_nbytes

    @property
    def reserved_nbytes(self) -> int:
        """Bytes allocated ahead of need."""
        return sum(x.nbytes for x in self.buffers) - self.nbytes

    def append(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Add tokens: k [Hkv, t, D], v [Hkv, t, Dv], positions [Hkv|1, t]."""
        end = self.length + k.shape[1]
        if end > self._k.shape[1]:
            wanted = max(end, self._k.shape[1] * 5 // 4) if self.reserve else end
            capacity = self._pages(wanted) * self.page_size
            self._k, self._v, self._positions = (self._grown(x, capacity) for x in (self.k, self.v, self.positions))
            if self._scores is not None:
                self._scores = self._grown(self._scores[:, : self.length], capacity)
        self._k[:, self.length : end] = k
        self._v[:, self.length : end] = v
        self._positions[:, self.length : end] = positions
        if self._scores is not None:
            self._scores[:, self.length : end] = 0
        self.length = end

    def pop_front(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Take the oldest `count` tokens out; pages that fall empty are freed."""
        taken = tuple(x[:, :count].clone() for x in (self._k, self._v, self._positions))
        rest = tuple(x[:, count : self.length] for x in (self._k, self._v, self._positions))
        self.length -= count
        capacity = self._k.shape[1] if self.reserve else self._pages(self.length) * self.page_size
        self._k, self._v, self._positions = (self._grown(x, capacity) for x in rest)
        if self._scores is not None:
            self._scores = self._grown(self._scores[:, count : count + self.length], capacity)
        return taken  # type: ignore[return-value]

    def clone(self) -> TokenStore:
        return TokenStore(self.k, self.v, self.positions, self.page_size, reserve=self.reserve, scores=self.scores)

    def to_tensors(self) -> dict[str, Tensor]:
        held = {"k": self.k, "v": self.v, "positions": self.positions}
        held |= {} if self.scores is None else {"scores": self.scores}
        return {name: x.contiguous() for name, x in held.items()}
