"""What a decode step computes between two attentions, in one call of C++ where there is a compiler.

A step streams weights and entries through the caches, so that what comes between, dozens of small operators, finds neither its code nor
its tables in them: one after the other they take longer than their numbers. `fuse` takes runs of nodes out of a graph; each becomes
a list of instructions (`instructions.py`) that one function goes through (`template.cpp`).
"""

from __future__ import annotations

from torch.fx import GraphModule

from semkv.kernels.runs import join_runs
from semkv.kernels.segments.cpp import Segment, segments_library
from semkv.kernels.segments.instructions import is_supported


def fuse(module: GraphModule) -> GraphModule:
    """A graph that computes the same with the same parameters; its runs of supported nodes are calls of a `Segment`.

    It is for steps of few tokens, and for this process: it cannot be saved.
    """
    return join_runs(module, is_supported, Segment)


__all__ = ["Segment", "fuse", "segments_library"]
