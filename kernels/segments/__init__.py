"""What a decode step computes, in one call of C++ where there is a compiler.

A step streams weights and entries through the caches, so that what comes between, hundreds of small operators, finds neither its code nor
its tables in them: one after the other they take longer than their numbers. A `Segment` is a graph that becomes a list of instructions
(`operators.py`, `tape.py`), which one function goes through (`template.cpp`); some of them call functions of other kernels
(`semkv.kernels.calls`). `whole` makes one of a graph, `fuse` of the runs of nodes within a graph.
"""

from __future__ import annotations

from torch.fx import GraphModule

from semkv.kernels.runs import join_runs
from semkv.kernels.segments.cpp import Segment, segments_library
from semkv.kernels.segments.operators import is_supported
from semkv.kernels.segments.tape import Behind
from semkv.kernels.segments.together import Standing, Together


def fuse(module: GraphModule) -> GraphModule:
    """A graph that computes the same with the same parameters; its runs of supported nodes are calls of a `Segment`.

    It is for steps of few tokens, and for this process: it cannot be saved.
    """
    return join_runs(module, is_supported, Segment)


def whole(module: GraphModule) -> Segment:
    """All of a graph as one `Segment`, which is called with the graph's inputs in their order: tensors that it reads or writes in place.
    Those that come again with their numbers where they were cost a call little, and the same list `behind` the others nothing. Its `reason`
    says why the last call was not one of C++, None where it was: then nodes that there are no instructions for are computed by PyTorch, and
    what lies between by calls."""
    return Segment(module, parts=True)


__all__ = ["Behind", "Segment", "Standing", "Together", "fuse", "segments_library", "whole"]
