"""Weights that wrap others, as quantised ones do, taken apart for the time of a capture.

The graph then reads the plain tensors inside and computes with them what the wrapper would: a program of plain tensors, which is
saved, moved and run like any other, without the library that made the wrapper.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from semkv.model.plain_tensors import Wrapper, plain_tensors, wraps


class InnerWeights(nn.Module):
    """What is inside the wrapping parameters and buffers of a model, as parameters of its own that share their memory.

    paths: for each of `tensors` its name in the program, `layers.0.q_proj.weight.qdata` for one.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.wrappers: dict[str, Wrapper] = {}
        self.tensors = nn.ParameterList()
        self.paths: list[str] = []
        for name, tensor in _wrapping(model):
            wrapper = Wrapper.of(tensor)
            assert wrapper is not None
            self.wrappers[name] = wrapper
            for path, inner in plain_tensors(name, tensor):
                self.paths.append(path)
                self.tensors.append(nn.Parameter(inner, requires_grad=False) if type(inner) is Tensor else inner)

    def rebuilt(self) -> dict[str, Tensor]:
        """The model's wrapping tensors by name, made again of `tensors`, so that what is done with them is traced to those."""
        plain = iter(self.tensors)
        return {name: wrapper.made(plain) for name, wrapper in self.wrappers.items()}


def _wrapping(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for named in (model.named_parameters(), model.named_buffers()):
        yield from ((name, tensor) for name, tensor in named if wraps(tensor))


__all__ = ["InnerWeights"]
