"""Which layout of a launch is the fastest on this device: each candidate is run and timed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from semkv.kernels.generation import Launch
from semkv.kernels.mixed_attention.configuration import Configuration
from semkv.kernels.mixed_attention.triton import mixed_attention_launches
from semkv.kernels.timing import device_us
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
    generator = torch.Generator(device="cpu").manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, count, size, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)
        for heads, count, size in ((kv_heads * group, 1, dim), (kv_heads, entries, dim), (kv_heads, entries, value_dim))
    )
    positions = torch.arange(entries, dtype=torch.int32, device=device)[None, None]
    where = torch.full((1, 1), entries, dtype=torch.int64, device=device)
    found: dict[Configuration, float] = {}
    for candidate in candidates:
        _, made = mixed_attention_launches(q, where, [k], [v], [positions], scale=dim**-0.5, configuration=candidate)

        def run(made: Sequence[Launch] = made) -> None:
            for launch in made:
                launch.run()

        try:
            run()  # compiles
        except Exception as error:
            if type(error).__name__ != "OutOfResources":
                raise
            continue
        found[candidate] = device_us(run, device, repeats)
    return min(found, key=lambda candidate: found[candidate]), found
