"""Which layout of a launch is the fastest on this device: each candidate is run and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from semkv.kernels.mixed_attention.configuration import Configuration
from semkv.kernels.mixed_attention.triton import mixed_attention_triton
from semkv.kernels.tuning import Problem

CANDIDATES = (
    Configuration(),
    *(Configuration(block=block, stages=stages) for block, stages in ((32, 3), (64, 2), (64, 3), (128, 3))),
    *(Configuration(block=block, warps=8, stages=stages, registers=128) for block, stages in ((64, 3), (128, 2))),
    *(Configuration(block=32, warps=warps, registers=168) for warps in (2, 4)),
)
"""The defaults first: they stay where nothing is faster."""


def tune(
    problem: Problem,
    kv_heads: int,
    entries: int,
    device: torch.device,
    *,
    candidates: Sequence[Configuration] = CANDIDATES,
    repeats: int = 20,
) -> tuple[Configuration, dict[Configuration, float]]:
    """The fastest of `candidates` for one query token over `entries` exact entries, and the median microseconds of each.

    A layout that the device cannot launch (too much shared memory) is left out.
    """
    dtype, dim, value_dim, group = problem
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, count, size, generator=generator).to(device, dtype)
        for heads, count, size in ((kv_heads * group, 1, dim), (kv_heads, entries, dim), (kv_heads, entries, value_dim))
    )
    positions = torch.arange(entries, dtype=torch.int32, device=device)[None, None]
    where = torch.full((1, 1), entries, device=device)
    found: dict[Configuration, float] = {}
    for candidate in candidates:

        def run(candidate: Configuration = candidate) -> None:
            mixed_attention_triton(q, where, [k], [v], [positions], scale=dim**-0.5, configuration=candidate)

        try:
            run()  # compiles
        except Exception as error:
            if type(error).__name__ != "OutOfResources":
                raise
            continue
        found[candidate] = _median_us(run, device, repeats)
    return min(found, key=lambda candidate: found[candidate]), found


def _median_us(run: Callable[[], None], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(1000 * begin.elapsed_time(end))
        else:
            begun = time.perf_counter()
            run()
            times.append(1e6 * (time.perf_counter() - begun))
    return sorted(times)[len(times) // 2]
