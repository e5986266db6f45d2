"""The few calls that an evaluation makes on a compiled model, in one place."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from semkv.evaluation.schema import SHARES, Usage, Zoom
from semkv.evaluation.settings import Variant


def as_ids(ids: Sequence[int]) -> Tensor:
    """Ids as one row, [1, T] int64."""
    return torch.tensor([list(ids)], dtype=torch.int64, device="cpu")


class Subject:
    """A compiled model whose variants share one program and one prefill.

    compiled: a `semkv.CompiledModel`. identity: fingerprint of model, profile and dtypes; part of each cell's key.
    """

    def __init__(self, compiled: Any, identity: str):
        self.compiled = compiled
        self.identity = identity
        self._variants: dict[str, Any] = {}

    def variant(self, variant: Variant) -> Any:
        """The compiled model at one variant's method, budget and options. Raises what `with_method` raises."""
        key = variant.model_dump_json(exclude={"label"})
        if key not in self._variants:
            settings = self.compiled.settings.model_copy(update={"floor": 0})  # a cell's budget is what it says
            self._variants[key] = self.compiled.with_method(
                variant.method, budget=variant.budget, config=settings, **variant.options
            )
        return self._variants[key]

    def record(self, ids: Sequence[int], variants: Iterable[Variant]) -> Any:
        """Prefill `ids` once for all of `variants`, with surprisal and all queries where one of them needs it."""
        plans = [self.variant(v).placement.plan for v in variants]
        return self.compiled.prefill_record(
            as_ids(ids),
            surprisal=any(plan.reads_surprisal for plan in plans),
            all_queries=any(plan.reads_queries for plan in plans),
        )

    def synchronise(self) -> None:
        """Wait for the device, so that a clock read means something."""
        if self.compiled.device.type == "cuda":
            torch.cuda.synchronize(self.compiled.device)

    def extend(self, compiled: Any, state: Any, ids: Sequence[int]) -> tuple[Tensor, float]:
        """Feed `ids` to a state: logits of the last position [vocab], and the time it took in microseconds."""
        self.synchronise()
        started = time.perf_counter()
        logits = compiled.extend(state, as_ids(ids))
        self.synchronise()
        elapsed = 1e6 * (time.perf_counter() - started)
        return logits.reshape(-1, logits.shape[-1])[-1], elapsed

    def step(self, compiled: Any, states: Sequence[Any], ids: Sequence[int]) -> tuple[Tensor, float]:
        """Feed a token to each of several states: logits [len(states), vocab], and the time it took in microseconds."""
        self.synchronise()
        started = time.perf_counter()
        logits = compiled.step(states, as_ids(ids)[0])
        self.synchronise()
        return logits, 1e6 * (time.perf_counter() - started)


def usage_of(state: Any) -> Usage:
    """Bytes of a `semkv.runtime.state.State` per tier, and its transfers."""
    nbytes, stats = state.nbytes, state.stats
    return Usage(
        device=nbytes["peak"],
        full=state.full_bytes,
        budget_used=stats.peak_share,
        device_share=stats.device_share,
        attended_share=stats.attended_share,
        device_share_mean=stats.device_share_mean,
        attended_share_mean=stats.attended_share_mean,
        excess_share=stats.excess_share,
        excess_share_mean=stats.excess_share_mean,
        workspace=nbytes["workspace"],
        host=nbytes["host"],
        disk=nbytes["disk"],
        reserved=nbytes["reserved"],
        window=nbytes["window"],
        moved=stats.moved_bytes_per_step * stats.steps,
        steps=stats.steps,
    )


def worst(first: Usage | None, second: Usage) -> Usage:
    """The larger of two usages by device share, with the largest tiers and the transfers of both."""
    if first is None:
        return second
    larger = first if first.device * second.full >= second.device * first.full else second
    return larger.model_copy(
        update={
            "budget_used": max(first.budget_used, second.budget_used),
            **{
                name: max(x for x in (getattr(first, name), getattr(second, name), 0.0) if x is not None)
                for name in SHARES
            },
            "host": max(first.host, second.host),
            "disk": max(first.disk, second.disk),
            "moved": first.moved + second.moved,
            "steps": first.steps + second.steps,
        }
    )


def zoom_of(state: Any) -> Zoom | None:
    """Zoom rates per site and query head; None where the method unfolds nothing."""
    stats = state.stats
    if not stats.zoom_rate or not stats.steps:
        return None
    sites = sorted(stats.zoom_rate)
    return Zoom(sites=sites, rates=[stats.zoom_rate[site].tolist() for site in sites], steps=stats.steps)


def add_zooms(first: Zoom | None, second: Zoom | None) -> Zoom | None:
    """The mean of two zoom counts, weighted by their steps; a site that one of them lacks counts as never unfolded."""
    if first is None or second is None:
        return first or second
    total = first.steps + second.steps
    sums: dict[int, list[float]] = {}
    for zoom in (first, second):
        for site, rates in zip(zoom.sites, zoom.rates):
            sums[site] = [a + zoom.steps * b for a, b in zip(sums.get(site, [0.0] * len(rates)), rates)]
    sites = sorted(sums)
    return Zoom(sites=sites, rates=[[x / total for x in sums[site]] for site in sites], steps=total)
