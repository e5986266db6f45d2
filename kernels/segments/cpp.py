"""A graph that is computed by one call of C++: its tapes, by the layouts of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from semkv.kernels.segments.blocks import Blocks
from semkv.kernels.segments.parts import cut, roles_of
from semkv.kernels.segments.reading import Reading
from semkv.kernels.segments.tape import NOTHING, Behind, Seen, Tape, layout_of, segments_library
from semkv.kernels.segments.values import UnsupportedNode

_making = RLock()
"""Held while tapes are looked up and made."""
MOST_TAPES = 64
"""Of layouts that a segment keeps, the most recent ones."""


class Refusal(NamedTuple):
    """Why one call does not answer inputs of some layouts, and what does."""

    reason: str
    run: Callable[..., Any]


@dataclass
class _Known:
    """What segments of one graph share. tapes: by layouts of inputs; cuts: the graph in parts, by the nodes that lie between."""

    reading: Reading | None = None
    blocks: Blocks | None = None
    tapes: dict[tuple[Any, ...], Tape | Refusal] = field(default_factory=dict)
    cuts: dict[frozenset[Node], GraphModule] = field(default_factory=dict)


class Segment:
    """Nodes of a graph that are computed together: by one call where there are instructions for all of them.

    module: the nodes as a graph of their own, whose placeholders are its inputs and `get_attr` its weights. It is the reference, and
    answers calls that C++ does not: gradients, other dtypes or devices. What it writes in place, C++ does too.
    parts: whether a graph of which some nodes have no instructions is cut there, and what lies between computed by calls; else the module
    answers. reason: why not one call of C++ answered the last time; None where it did.
    """

    def __init__(self, module: GraphModule, *, parts: bool = False) -> None:
        self.module, self.parts = module, parts
        self.reason: str | None = "it was never called"
        self._known = _Known()
        self._last: Seen | None = None

    def another(self) -> Segment:
        """One for other inputs, which shares the instructions."""
        other = Segment(self.module, parts=self.parts)
        other._known = self._known
        return other

    def __call__(self, *inputs: Any, behind: Behind = NOTHING) -> Any:
        """What the graph returns of `inputs` and those `behind` them."""
        if torch.is_grad_enabled():
            self.reason = "gradients are recorded"
            return self.module(*inputs, *behind)
        seen = self._last
        addresses = None if seen is None else seen.addresses(inputs, behind)
        if seen is None or addresses is None:
            found = self.tape_of((*inputs, *behind))
            if isinstance(found, Refusal):
                self.reason = found.reason
                return found.run(*inputs, *behind)
            seen = Seen(found)
            addresses = seen.addresses(inputs, behind)
            if addresses is None:
                self.reason = "an input or a weight changed while it was looked at"
                return self.module(*inputs, *behind)
            self._last = seen
        self.reason = None
        return seen.tape.run(addresses)

    def tape_of(self, inputs: tuple[Any, ...]) -> Tape | Refusal:
        """The tape for inputs of these layouts, or why there is none."""
        with _making:
            return self._found(inputs)

    def _found(self, inputs: tuple[Any, ...]) -> Tape | Refusal:
        known = self._known
        weights = [] if known.reading is None else known.reading.weights
        given = (*inputs, *weights)
        kinds = [layout_of(x) if isinstance(x, Tensor) else x for x in given]
        key = (*kinds, frozenset([x.device for x in given if isinstance(x, Tensor)]))
        found = known.tapes.pop(key, None)
        if found is None:
            try:
                if known.reading is None:
                    known.reading = Reading(self.module)
                    known.blocks = Blocks(known.reading)
                    return self._found(inputs)
                found = Tape(known.reading, known.blocks, inputs, kinds)
            except UnsupportedNode as reason:
                found = Refusal(str(reason), self._in_parts(inputs))
        while len(known.tapes) >= MOST_TAPES:
            del known.tapes[next(iter(known.tapes))]
        known.tapes[key] = found
        return found

    def _in_parts(self, inputs: tuple[Any, ...]) -> GraphModule:
        """What answers inputs of these layouts in place of one call."""
        known, reading = self._known, self._known.reading
        given = [] if reading is None else [x for x in (*inputs, *reading.weights) if isinstance(x, Tensor)]
        if reading is None or not self.parts or not all(x.is_cpu for x in given):
            return self.module
        roles = roles_of(reading, inputs)
        nodes = frozenset(roles.outside)
        if nodes not in known.cuts:
            known.cuts[nodes] = cut(self.module, roles, Segment) or self.module
        return known.cuts[nodes]


__all__ = ["Refusal", "Segment", "segments_library"]
