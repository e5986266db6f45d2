"""Time to the first token, step times, bytes and transfers of compiled models on this machine: `semkv bench`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from semkv.compiled import CompiledModel
from semkv.errors import InputError, SemkvError
from semkv.runtime.state import State

PERCENTILES = (50, 90, 99)
CHECKED_PROMPT, CHECKED_TOKENS = 64, 8


@dataclass(frozen=True)
class Timing:
    """One compiled model on one prompt.

    first_ms: from ids to the first token's logits, prefill and compression of all rows. step_ms: of each timed decode step, in
    order; the device was awaited after each, so a step contains what it waited for transfers. nbytes: `State.nbytes` after the last
    step. full_bytes: of the full KV then. moved_bytes: per step and row, host to device. overlap: of what steps unfolded, the share that
    was there. device_share, attended_share: the largest part of its full KV that a layer held on the device, and read, in a step;
    device_share_mean, attended_share_mean: over layers and steps. excess_share, excess_share_mean: likewise, of what a layer held
    beyond its budget.
    """

    method: str
    budget: float | int | None
    tokens: int
    rows: int
    first_ms: float
    step_ms: tuple[float, ...]
    nbytes: dict[str, int]
    full_bytes: int
    moved_bytes: float
    overlap: float
    device_share: float = 0.0
    attended_share: float = 0.0
    device_share_mean: float = 0.0
    attended_share_mean: float = 0.0
    excess_share: float = 0.0
    excess_share_mean: float = 0.0

    def percentile(self, percent: int) -> float:
        """Milliseconds that so many of a hundred steps took at most (nearest rank)."""
        ordered = sorted(self.step_ms)
        return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]

    @property
    def tokens_per_second(self) -> float:
        """Of all rows, over the timed steps."""
        return 1000 * self.rows * len(self.step_ms) / sum(self.step_ms)


@torch.no_grad()
def time_compiled(compiled: CompiledModel, ids: Tensor, *, warmup: int, steps: int) -> Timing:
    """Read the prompt ids [B, T], take `warmup` greedy steps, then `steps` timed ones.

    Raises
    ------
    InputError: no steps, or a prompt and steps that do not fit the model's context.
    """
    if steps < 1 or warmup < 0:
        raise InputError(f"{steps} steps after {warmup} of warm-up: expected at least one step and no fewer than 0")
    limit = compiled.program.max_positions
    if limit is not None and ids.shape[1] + warmup + steps > limit:
        raise InputError(
            f"{ids.shape[1]} tokens and {warmup + steps} steps do not fit the model's context of {limit}: take a shorter prompt"
        )
    first_ms, state = _milliseconds(lambda: compiled.prefill(ids), compiled.device)
    for _ in range(warmup):
        _step(compiled, state)
    times = [_milliseconds(lambda: _step(compiled, state), compiled.device)[0] for _ in range(steps)]
    stats = state.stats
    return Timing(
        method=compiled.method.name,
        budget=compiled.budget,
        tokens=ids.shape[1],
        rows=ids.shape[0],
        first_ms=first_ms,
        step_ms=tuple(times),
        nbytes=state.nbytes,
        full_bytes=state.full_bytes,
        moved_bytes=stats.moved_bytes_per_step,
        overlap=stats.overlap,
        device_share=stats.device_share,
        attended_share=stats.attended_share,
        device_share_mean=stats.device_share_mean,
        attended_share_mean=stats.attended_share_mean,
        excess_share=stats.excess_share,
        excess_share_mean=stats.excess_share_mean,
    )


def _step(compiled: CompiledModel, state: State) -> Tensor:
    return compiled.extend(state, state.logits.argmax(-1, keepdim=True))


def _milliseconds(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """How long a call took until the device was done, and its result."""
    started = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * (time.perf_counter() - started), result


@torch.no_grad()
def check_tokens(model: Any, full: CompiledModel, ids: Tensor) -> None:
    """Raise `SemkvError` unless `full`, compiled with every token kept, generates what the model itself does on a part of `ids`."""
    prompt = ids[:1, :CHECKED_PROMPT]
    options: dict[str, Any] = {
        "max_new_tokens": CHECKED_TOKENS,
        "do_sample": False,
        "attention_mask": torch.ones_like(prompt),
    }
    theirs, ours = model.generate(prompt, **options), full.generate(prompt, **options)
    if not torch.equal(theirs, ours):
        raise SemkvError(
            f"with every token kept, the compiled model generates {ours[0, prompt.shape[1] :].tolist()} and the model itself "
            f"{theirs[0, prompt.shape[1] :].tolist()}: nothing is timed before they agree"
        )
