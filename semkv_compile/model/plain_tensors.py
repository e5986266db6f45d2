"""Tensors that wrap others, as quantised weights do, seen as the plain tensors that they are made of.

A wrapper says what it holds in `__tensor_flatten__`, and is made again by `__tensor_unflatten__`: the protocol of `torch` for
tensor subclasses, which libraries of quantised weights follow. Nothing of those libraries is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from semkv.errors import CaptureError


@dataclass(frozen=True)
class Wrapper:
    """How a wrapping tensor is made from plain ones.

    kind: its class. parts: what it holds by name, in order; None where that is plain. context: what its class says beside its parts
    (dtypes, sizes of blocks). size, stride: its own.
    """

    kind: type
    parts: dict[str, Wrapper | None]
    context: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Wrapper | None:
        """None for a tensor that wraps none."""
        if not wraps(tensor):
            return None
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: cls.of(_part(tensor, name)) for name in names}
        return cls(type(tensor), parts, context, tuple(tensor.size()), tuple(tensor.stride()))

    def made(self, plain: Iterator[Tensor]) -> Tensor:
        """A tensor like the one that was looked at, of the next ones of `plain`, in the order of `plain_tensors`."""
        inner = {name: next(plain) if part is None else part.made(plain) for name, part in self.parts.items()}
        return self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)  # type: ignore[attr-defined]


def wraps(tensor: Tensor) -> bool:
    """Whether a tensor is made of others."""
    return hasattr(tensor, "__tensor_flatten__") and hasattr(type(tensor), "__tensor_unflatten__")


def plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of one called `name`: itself, or what it holds as `name.part`, `name.part.part`, in order.

    Parts of a parameter are parameters, without gradient; they share its memory.
    """
    if not wraps(tensor):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        for path, inner in plain_tensors(f"{name}.{part}", _part(tensor, part)):
            whole = isinstance(tensor, nn.Parameter) and not isinstance(inner, nn.Parameter)
            yield path, nn.Parameter(inner, requires_grad=False) if whole else inner


def named_plain_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`plain_tensors` of a module's parameters, then of its buffers; each once, under its first name."""
    for named in (module.named_parameters(), module.named_buffers()):
        for name, tensor in named:
            yield from plain_tensors(name, tensor)


def place(tensor: Tensor) -> tuple[object, ...]:
    """What two objects have in common that are one tensor: a wrapping one is taken apart anew each time."""
    if not tensor.numel() or tensor.is_meta:
        return (id(tensor),)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, isinstance(tensor, nn.Parameter)


def _part(tensor: Tensor, name: str) -> Tensor:
    part = getattr(tensor, name)
    if not isinstance(part, Tensor):
        raise CaptureError(
            f"a {type(tensor).__name__} holds {name!r}, a {type(part).__name__}; expected a weight that is made of tensors: "
            "load the model in another format"
        )
    return part


__all__ = ["Wrapper", "named_plain_tensors", "place", "plain_tensors", "wraps"]
