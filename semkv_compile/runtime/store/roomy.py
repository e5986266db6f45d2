"""Tensors that grow along their second dimension, in buffers with room behind them, so that the sizes in a step's graph seldom change."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.runtime.store.quantization import Held, Quantized

SHARE = 16
"""Buffers grow in steps of a power of two, of which there are at least so many in them."""


def _step(count: int) -> int:
    return 1 << max(0, (count // SHARE).bit_length() - 1)


def room_for(count: int) -> int:
    """Columns of a buffer of `count`: their number alone says, so that what is computed of it is, to the bit, the same in every copy."""
    return -(-count // _step(count)) * _step(count)


def within(count: int) -> int:
    """The most columns of a buffer that are no more than `count`."""
    return count // _step(count) * _step(count)


class Roomy:
    """Buffers by name. What stands behind a tensor in its buffer is finite and says nothing."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def joined(self, name: str, old: Quantized | Tensor | None, new: Quantized | Tensor) -> Quantized | Tensor:
        """old [H, n, ...] and new [H, m, ...] one behind the other; where `old` begins its buffer, only `new` is copied."""
        if isinstance(new, Tensor):
            assert old is None or isinstance(old, Tensor)
            return self._joined(name, old, new)
        assert old is None or isinstance(old, Quantized)
        codes = self._joined(f"{name}.codes", None if old is None else old.codes, new.codes)
        scale = self._joined(f"{name}.scale", None if old is None else old.scale, new.scale)
        return Quantized(codes, scale, new.bits, new.dim)

    def _joined(self, name: str, old: Tensor | None, new: Tensor) -> Tensor:
        if old is None:
            return new
        count = old.shape[1] + new.shape[1]
        buffer = self._buffers.get(name)
        if buffer is None or not _begins(old, buffer) or count > buffer.shape[1] or new.dtype != old.dtype:
            return torch.cat([old, new], 1)
        buffer[:, old.shape[1] : count] = new
        return buffer[:, :count]

    def whole(self, name: str, x: Tensor) -> Tensor:
        """A buffer that begins with x [H, n, ...]: its own, or one that it is copied to."""
        buffer = self._buffers.get(name)
        if buffer is not None and _begins(x, buffer) and buffer.shape[1] == room_for(x.shape[1]):
            return buffer
        alike = (
            buffer is not None
            and buffer.dtype == x.dtype
            and buffer.shape[0] == x.shape[0]
            and buffer.shape[2:] == x.shape[2:]
        )
        capacity = room_for(x.shape[1])
        if not alike or buffer.shape[1] != capacity:
            buffer = self._buffers[name] = torch.zeros(
                (x.shape[0], capacity, *x.shape[2:]), dtype=x.dtype, device=x.device
            )
        buffer[:, : x.shape[1]] = x
        return buffer

    def settled(self, name: str, x: Held) -> Held:
        """x [H, n, ...], or what is held of it, as the first columns of its buffer."""
        if isinstance(x, Quantized):
            codes, scale = self.settled(f"{name}.codes", x.codes), self.settled(f"{name}.scale", x.scale)
            return x if codes is x.codes and scale is x.scale else Quantized(codes, scale, x.bits, x.dim)
        if x is None:
            return x
        buffer = self.whole(name, x)
        return x if x.data_ptr() == buffer.data_ptr() else buffer[:, : x.shape[1]]


def _begins(x: Tensor, buffer: Tensor) -> bool:
    """Whether x [H, n, ...] is the first columns of a buffer."""
    return (
        x.data_ptr() == buffer.data_ptr()
        and x.dtype == buffer.dtype
        and x.shape[1] <= buffer.shape[1]
        and x.shape[:1] + x.shape[2:] == buffer.shape[:1] + buffer.shape[2:]
        and x.stride() == buffer.stride()
    )


__all__ = ["SHARE", "Roomy", "room_for", "within"]
