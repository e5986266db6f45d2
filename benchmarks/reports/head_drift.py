"""How often HeteroCache's pivots drift, and the tail of step times (App. D.4): a part of `reports_heterocache.py`, which runs it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.lib.claims import Figures, over_contexts, verdict
from benchmarks.lib.costs import spread
from benchmarks.lib.grids import FAMILIES, Bench, table
from semkv.evaluation.schema import Interval
from semkv.evaluation.statistics import quantile, ratio_estimate
from semkv.evaluation.subject import as_ids
from semkv.evaluation.tables import percent

DRIFTS = (0.1, 0.5)
"""Values of tau_drift."""
GENERATED = 1000
CONTEXTS = 4
"""Contexts of each family behind which tokens are sampled."""
RARE = 0.823
"""The paper's trigger rate in percent (App. D.4)."""
TAIL = 1.41
"""P99 over P95 of a step at 192K, its worst (Table 9: 0.127 and 0.090 s)."""


@torch.no_grad()
def drift(
    bench: Bench, budget: float, options: Mapping[str, Any], family: str, index: int, length: int
) -> dict[str, Any]:
    """Checks, updates and step times [microseconds] while `GENERATED` tokens are sampled behind a family's context."""
    compiled = bench.compiled.with_method("heterocache", budget, config=bench.compiled.settings, **options)
    state = compiled.prefill(as_ids(bench.sample(length, index, family).ids))
    chance = torch.Generator().manual_seed(0)
    spent = []
    for _ in range(GENERATED):
        token = int(torch.multinomial(state.logits[-1].float().softmax(-1), 1, generator=chance))
        started = time.perf_counter()
        compiled.extend(state, as_ids((token,)))
        spent.append(1e6 * (time.perf_counter() - started))
    counts = [note.tolist() for name, note in state.rows[0].notes.items() if name.startswith("pivot.checks.")]
    return {"checks": [a for a, _ in counts], "updates": [b for _, b in counts], "step_us": spent}


def drifts(
    bench: Bench, figures: Figures, budget: float, options: Mapping[str, Any], length: int
) -> list[dict[str, Any]]:
    """The trigger rate at each tau_drift, by family and over all, and the tail of step times (App. D.4)."""
    kept = []
    families = FAMILIES if bench.is_bundled else bench.families[:1]
    contexts = bench.arguments.contexts or CONTEXTS
    for tau in DRIFTS:
        made: dict[str, list[dict[str, Any]]] = {family: [] for family in families}
        for family, index in itertools.product(families, range(contexts)):
            own = {**options, "tau_drift": tau}
            settings = own | {
                "family": family,
                "context": index,
                "length": length,
                "budget": budget,
                "tokens": GENERATED,
            }
            found = figures.get(
                "drift", settings, lambda o=own, f=family, n=index: drift(bench, budget, o, f, n, length)
            )
            made[family].append(found)
        over_all = rates([one for family in families for one in made[family]])
        kept.append({"tau_drift": tau, **over_all, "families": {family: rates(made[family]) for family in families}})
    return kept


def drift_table(kept: list[dict[str, Any]]) -> str:
    lines = []
    for at in kept:
        of = {**at["families"], "all": at}
        lines += [[f"{at['tau_drift']:g}", family, *drift_line(found)] for family, found in of.items()]
    columns = [
        "tau_drift",
        "family",
        "checks",
        "updates, % of checks",
        "updates, % of tokens",
        "step, ms: median",
        "p95",
        "p99",
    ]
    return table(columns, lines)


def drift_verdicts(kept: list[dict[str, Any]]) -> str:
    """The paper's trigger rate beside ours, by both readings, and the tail of step times; intervals are over contexts."""
    lines = []
    for at in kept:
        for reading, name in (("checks", "per_check"), ("tokens", "per_token")):
            rate = Interval.model_validate(at["rates"][name])
            lines.append(
                [
                    f"updates are rare: {RARE:g} % over 1K tokens",
                    f"tau_drift {at['tau_drift']:g}, of {reading}: {percent(rate)} %",
                    verdict(rate, high=RARE / 100),
                ]
            )
        tail = over_contexts(at["tails"])
        lines.append(
            [
                f"no severe stalls: P99 at most {TAIL:g} times P95 from 32K to 224K (Table 9)",
                f"tau_drift {at['tau_drift']:g}: {spread(tail)} times",
                verdict(tail, high=TAIL),
            ]
        )
    return table(["the paper says", "", "here"], lines)


def rates(made: list[dict[str, Any]]) -> dict[str, Any]:
    """Of contexts: checks, updates per check and per pivot and token with 95 % intervals over them, quantiles of step times, and of each
    the tail of its own."""
    checks, updates = ([sum(one[name]) for one in made] for name in ("checks", "updates"))
    tokens = [len(one["checks"]) * len(one["step_us"]) for one in made]
    steps = [t for one in made for t in one["step_us"]]

    def rate(of: Sequence[float]) -> dict[str, Any]:
        return Interval.of(ratio_estimate(updates, of, range(len(made)))).model_dump()

    return {
        "checks": sum(checks),
        "contexts": len(made),
        "rates": {"per_check": rate(checks), "per_token": rate(tokens)},
        "tails": [quantile(one["step_us"], 0.99) / quantile(one["step_us"], 0.95) for one in made],
        "step_ms": [quantile(steps, share) / 1000 for share in (0.5, 0.95, 0.99)],
    }


def drift_line(found: dict[str, Any]) -> list[str]:
    each = [percent(Interval.model_validate(found["rates"][name])) for name in ("per_check", "per_token")]
    return [str(found["checks"]), *each, *[f"{value:.1f}" for value in found["step_ms"]]]
