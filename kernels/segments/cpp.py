"""A graph that is computed by one call of C++: its tapes, by the layouts of its inputs."""

from __future__ import annotations

from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from semkv.kernels.segments.reading import Reading
from semkv.kernels.segments.tape import Tape, layout_of, segments_library
from semkv.kernels.segments.values import UnsupportedNode

_making = RLock()
"""Held while tapes are looked up and made."""
MOST_TAPES = 16
"""Of layouts that a segment keeps, the most recent ones."""


class Segment:
    """Nodes of a graph that are computed together: by one call where there are instructions for all of them, else one by one.

    module: the nodes as a graph of their own, whose placeholders are its inputs and `get_attr` its weights. It is the reference, and
    answers calls that C++ does not: gradients, other dtypes or devices. What it writes in place, C++ does too.
    reason: why the module answered the last call; None where one call of C++ did.
    """

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.reason: str | None = "it was never called"
        self._reading: Reading | None = None
        self._tapes: dict[tuple[Any, ...], Tape | str] = {}
        self._last: Tape | None = None

    def __call__(self, *inputs: Any) -> Any:
        if torch.is_grad_enabled():
            self.reason = "gradients are recorded"
            return self.module(*inputs)
        tape = self._last
        addresses = None if tape is None else tape.addresses(inputs)
        if tape is None or addresses is None:
            found = self._tape(inputs)
            addresses = None if isinstance(found, str) else found.addresses(inputs)
            if isinstance(found, str) or addresses is None:
                self.reason = found if isinstance(found, str) else "an input or a weight changed while it was looked at"
                return self.module(*inputs)
            tape = self._last = found
        self.reason = None
        return tape.run(addresses)

    def _tape(self, inputs: tuple[Any, ...]) -> Tape | str:
        """The tape for inputs of these layouts, or why there is none."""
        with _making:
            return self._found(inputs)

    def _found(self, inputs: tuple[Any, ...]) -> Tape | str:
        weights = [] if self._reading is None else self._reading.weights
        key = tuple([(x.device.type, layout_of(x)) if isinstance(x, Tensor) else x for x in (*inputs, *weights)])
        found = self._tapes.pop(key, None)
        if found is None:
            try:
                if self._reading is None:
                    self._reading = Reading(self.module)
                    return self._found(inputs)
                found = Tape(self._reading, inputs)
            except UnsupportedNode as reason:
                found = str(reason)
        while len(self._tapes) >= MOST_TAPES:
            del self._tapes[next(iter(self._tapes))]
        self._tapes[key] = found
        return found


__all__ = ["Segment", "segments_library"]
