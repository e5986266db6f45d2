"""What changes over the steps of a calibration: learning rate, budget weight and context length."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from .settings import CalibrationSettings


def rate_factor(step: int, settings: CalibrationSettings) -> float:
    """Factor on the learning rate: linear warm-up, then cosine decay to zero."""
    warm = settings.warmup * settings.max_steps
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1.0, settings.max_steps - warm)))


def budget_weight(step: int, settings: CalibrationSettings) -> float:
    """lambda_3 at a step: from 0 to its target over the first half, constant from there on."""
    return settings.lambda_budget * min(1.0, 2 * step / settings.max_steps)


def stage(step: int, settings: CalibrationSettings) -> int:
    """Index into `settings.lengths` at a step: equal parts of the steps, short contexts first."""
    count = len(settings.lengths)
    return min(count - 1, step * count // settings.max_steps)


def sequence_index(step: int, count: int, settings: CalibrationSettings) -> int:
    """Which of a stage's `count` sequences a step takes: all of them in each round, in an order fixed by the seed."""
    generator = torch.Generator(device="cpu").manual_seed(settings.seed * 1_000_003 + step // count)
    return int(torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu")[step % count])


def plan(settings: CalibrationSettings, counts: dict[int, int]) -> Iterator[tuple[int, list[int]]]:
    """(context length, sequences) of every step, the student's first; `counts` are the sequences per length."""
    for step in range(settings.max_steps):
        length = settings.lengths[stage(step, settings)]
        many = min(settings.zoom_contexts, counts[length])
        yield length, [sequence_index(step * many + turn, counts[length], settings) for turn in range(many)]
