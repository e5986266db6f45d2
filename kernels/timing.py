"""How long a device takes for what the host launches, without the time that launching takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

TOGETHER = 10
"""Runs that are launched at once, as one CUDA graph: the device goes from one to the next."""


def device_us(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Microseconds of one `run`, the median of `repeats`; on CUDA without what the host takes, which small kernels are shorter than.

    It has run before, so that it is compiled, and must neither ask the device for anything nor copy from memory that is not pinned.
    """
    if device.type != "cuda":
        return median(_host_us(run) for _ in range(repeats))
    times = []
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(TOGETHER):
                run()
        graph.replay()
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1000 * begin.elapsed_time(end) / TOGETHER)
    return median(times)


def _host_us(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - begun)


__all__ = ["device_us"]
