"""How the work of a Triton launch of mixed attention is laid out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Configuration:
    """The layout of a launch; the result depends on it through rounding alone.

    block: entries per tile; 0: what `block_for` says. warps, stages: per program, stages of the load pipeline. splits: programs that
    share the entries of one KV head; 0: as many as make eight per multiprocessor. registers: per thread at most; 0: 255, or 168 beside
    factored entries and codes. Of the layouts that were timed on an H200 the defaults were the fastest (docs/results/gpu.md).
    """

    block: int = 0
    warps: int = 4
    stages: int = 2
    splits: int = 0
    registers: int = 0
