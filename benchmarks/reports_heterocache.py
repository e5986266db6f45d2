"""HeteroCache on the bundled model: role counts, trigger rate, transfer of the calibration, ablations, thresholds, costs by length.

    python benchmarks/reports_heterocache.py           # an interrupted run goes on
    python benchmarks/reports_heterocache.py --text one.txt --text other.txt       # calibrated on these instead
    python benchmarks/reports_heterocache.py --page    # the page alone, from the results that are there

40 questions per family at 4K tokens, asked after compression. Without `--text`, the
two calibration sources are generated prose and task haystacks with their questions. Writes
benchmarks/results/reports_heterocache.json and docs/results/reports_heterocache.md.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from costs import ABOUT, LINK, Contender, Direction, by_length, costs_table, directions_table, rising, times_full
from grids import DOCS, FAMILIES, Bench, parser, provenance_of, read_parts, table, write_document
from head_transfer import ALWAYS, SIMILAR, overlap_table, roles_of, transfer, transfer_table
from quality import points
from reports import EQUAL, Claim, Figures, claims_table, curve, draw_curves, verdict, write_parts

from semkv.evaluation import Grid, Report, Variant
from semkv.evaluation.samples import make_sample
from semkv.evaluation.statistics import quantile, ratio_estimate
from semkv.evaluation.subject import as_ids
from semkv.evaluation.tables import markdown, percent, size
from semkv.methods import find_method
from semkv.profiles.schema import Profile

NAME = "reports_heterocache"
SAMPLES = 40
CLUSTERS = {"tau_stable": ALWAYS, "tau_similar": 0.2}
FEW_PIVOTS = {"tau_stable": ALWAYS, "tau_similar": 0.28}
EACH_STEP = {"every": 1, "tau_drift": 1.0}
FAITHFUL = 0.3
STRICT = (0.1, 0.2)
STABLE = (ALWAYS, 0.5)
DRIFTS = (0.1, 0.5)
GENERATED = 1000
CONTEXTS = 4
"""Contexts of each family behind which tokens are sampled."""
RARE = 0.823
"""The paper's trigger rate in percent (App. D.4)."""
TAIL = 1.41
"""P99 over P95 of a step at 192K, its worst (Table 9: 0.127 and 0.090 s)."""
TIGHT = (0.03, 0.05, 0.1)
OMNIKV = "omnikv, strict"
STRICT_OWN = "strict, the paper's thresholds"
Line = tuple[str, str, dict[str, Any]]
"""Label, method, options."""

AGAINST_OMNIKV: tuple[Line, ...] = (
    (STRICT_OWN, "heterocache", {"strict": True}),
    ("uniform allocation", "heterocache", {"strict": True, "uniform": True}),
    ("an index of 8 bits", "heterocache", {"strict": True, "bits": 8}),
    (OMNIKV, "omnikv", {"strict": True}),
)
AGAINST_SHADOWKV: tuple[Line, ...] = (
    (STRICT_OWN, "heterocache", {"strict": True}),
    ("uniform allocation", "heterocache", {"strict": True, "uniform": True}),
    ("shadowkv", "shadowkv", {}),
    ("shadowkv, no outlier chunks", "shadowkv", {"outliers": 0}),
    ("shadowkv, half of the budget fixed", "shadowkv", {"fixed_share": 0.5}),
    ("shadowkv, both", "shadowkv", {"outliers": 0, "fixed_share": 0.5}),
)
"""Each takes away something that tells `strict` from the other method."""

VARIANTS: tuple[tuple[str, tuple[float, ...], dict[str, Any]], ...] = (
    ("the paper's thresholds", (0.95,), {}),
    ("clusters, W = 5", (FAITHFUL,), CLUSTERS),
    ("clusters, W = 1", (FAITHFUL,), CLUSTERS | EACH_STEP),
    ("clusters, W = 1, uniform allocation", (FAITHFUL,), CLUSTERS | EACH_STEP | {"uniform": True}),
    ("clusters, no retrieval", (FAITHFUL,), CLUSTERS | {"retrieval": False}),
    ("three pivots, W = 1", (0.2,), FEW_PIVOTS | EACH_STEP),
    ("strict, the paper's thresholds", STRICT, {"strict": True}),
    ("strict, clusters, W = 5", STRICT[:1], {"strict": True} | CLUSTERS),
    ("strict, clusters, W = 1", STRICT, {"strict": True} | CLUSTERS | EACH_STEP),
    ("strict, clusters, no retrieval", STRICT[:1], {"strict": True, "retrieval": False} | CLUSTERS),
)
QASPER = {"uniform": "Qasper at 50 %: -1.0 (Table 4)", "static": "Qasper at 50 %: -0.7 (Table 4)"}
CLAIMS = (
    Claim("clusters, W = 1, uniform allocation", "clusters, W = 1", "lower", QASPER["uniform"], FAITHFUL),
    Claim("clusters, no retrieval", "clusters, W = 1", "lower", QASPER["static"], FAITHFUL),
    Claim("clusters, no retrieval", "clusters, W = 5", "lower", QASPER["static"], FAITHFUL),
    Claim("strict, clusters, no retrieval", "strict, clusters, W = 1", "lower", QASPER["static"], STRICT[0]),
    Claim("strict, clusters, no retrieval", "strict, clusters, W = 5", "lower", QASPER["static"], STRICT[0]),
)


def grid(variants: list[Variant], samples: int, length: int) -> Grid:
    """These variants beside the full cache, two questions about each context."""
    return Grid(
        variants=(Variant(method="full"), *variants),
        families=FAMILIES,
        lengths=(length,),
        samples=samples,
        questions_per_context=2,
    )


def ablations(samples: int, length: int) -> Grid:
    """Settings that work, and the two ablations of Table 4."""
    variants = [
        Variant(method="heterocache", budget=budget, label=label, options=options)
        for label, budgets, options in VARIANTS
        for budget in budgets
    ]
    return grid(variants, samples, length)


def swept(stable: float, similar: float) -> str:
    return f"tau_stable {stable:g}, tau_sim {similar:g}"


def thresholds(samples: int, length: int) -> Grid:
    """Fig. 5 at a budget that any thresholds can live in: strict, 10 %."""
    variants = [
        Variant(
            method="heterocache",
            budget=STRICT[0],
            label=swept(stable, similar),
            options={"strict": True, "tau_stable": stable, "tau_similar": similar} | EACH_STEP,
        )
        for stable in STABLE
        for similar in SIMILAR
    ]
    return grid(variants, samples, length)


def against(lines: Sequence[Line], samples: int, length: int) -> Grid:
    """`strict` and another method at tight budgets, and what tells them apart taken away one by one."""
    variants = [
        Variant(method=method, budget=budget, label=label, options=options)
        for budget in TIGHT
        for label, method, options in lines
    ]
    return grid(variants, samples, length)


def transferred(samples: int, length: int) -> Grid:
    """What a calibration source is scored with (Table 5)."""
    variant = Variant(method="heterocache", budget=FAITHFUL, label="clusters, W = 1", options=CLUSTERS | EACH_STEP)
    return grid([variant], samples, length)


def role_table(profile: Profile) -> str:
    """How many heads have each role, and what the whole ones take of the KV (Fig. 6)."""
    lines = []
    for stable, similar in itertools.product(STABLE, SIMILAR):
        found = Counter(role for row in roles_of(profile, stable, similar) for role in row)
        whole = (found["pivot"] + found["volatile"]) / found.total()
        counts = [str(found[role]) for role in ("pivot", "satellite", "anchor", "volatile")]
        lines.append([f"{stable:g}", f"{similar:g}", *counts, f"{100 * whole:.0f}"])
    return table(["tau_stable", "tau_sim", "pivots", "satellites", "anchors", "volatile", "whole, % of the KV"], lines)


def allocation(bench: Bench) -> str:
    """Which layers Eq. 8 gives most of what compressed heads share, beside the layer that retrieves."""
    shares = find_method("heterocache", CLUSTERS).layer_shares(bench.compiled.program, bench.profile)
    found = [max(row) for row in bench.profile.info.retrieval_heads.semantic]
    retrieving, most = found.index(max(found)), shares.index(max(shares))
    given = [100 * share / sum(shares) for share in shares]
    return (
        "Eq. 8 gives a head room by the inverse of its stability. How stable a head is and whether it retrieves are two things here: "
        f"layer {most}, the least stable, takes {given[most]:.0f} % of what clustered heads share, with retrieval scores of at most "
        f"{found[most]:.2f}; layer {retrieving}, which finds the answers (up to {found[retrieving]:.2f}), takes {given[retrieving]:.0f} %, "
        f"where an even share is {100 / len(given):.0f} %. So a uniform allocation loses nothing on this model."
    )


# -- drift -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def drift(bench: Bench, family: str, index: int, length: int, tau_drift: float) -> dict[str, Any]:
    """Checks, updates and step times [microseconds] while `GENERATED` tokens are sampled behind a family's context."""
    compiled = bench.compiled.with_method("heterocache", FAITHFUL, tau_drift=tau_drift, **CLUSTERS)
    sample = make_sample(bench.tokenizer, family, length, index, seed=0, questions=1)
    state = compiled.prefill(as_ids(sample.ids))
    chance = torch.Generator().manual_seed(0)
    spent = []
    for _ in range(GENERATED):
        token = int(torch.multinomial(state.logits[-1].float().softmax(-1), 1, generator=chance))
        started = time.perf_counter()
        compiled.extend(state, as_ids((token,)))
        spent.append(1e6 * (time.perf_counter() - started))
    counts = [note.tolist() for name, note in state.rows[0].notes.items() if name.startswith("pivot.checks.")]
    return {"checks": [a for a, _ in counts], "updates": [b for _, b in counts], "step_us": spent}


def drifts(bench: Bench, figures: Figures, length: int) -> list[dict[str, Any]]:
    """The trigger rate at each tau_drift, by family and over all, and the tail of step times (App. D.4)."""
    kept = []
    for tau in DRIFTS:
        made: dict[str, list[dict[str, Any]]] = {family: [] for family in FAMILIES}
        for family, index in itertools.product(FAMILIES, range(CONTEXTS)):
            settings = {
                "family": family,
                "context": index,
                "length": length,
                "tau_drift": tau,
                "tokens": GENERATED,
            } | CLUSTERS
            found = figures.get("drift", settings, lambda f=family, i=index, t=tau: drift(bench, f, i, length, t))
            made[family].append(found)
        over_all = rates([one for family in FAMILIES for one in made[family]])
        kept.append({"tau_drift": tau, **over_all, "families": {family: rates(made[family]) for family in FAMILIES}})
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
    """The paper's trigger rate beside ours, by both readings."""
    rates_of = {f"{at['tau_drift']:g}": (100 * at["per_check"], 100 * at["per_token"]) for at in kept}
    least = min(rate for both in rates_of.values() for rate in both)
    tails = [f"tau_drift {at['tau_drift']:g}: {at['step_ms'][2] / at['step_ms'][1]:.2f} times" for at in kept]
    worst = max(at["step_ms"][2] / at["step_ms"][1] for at in kept)
    lines = [
        [
            f"updates are rare: {RARE:g} % over 1K tokens",
            "; ".join(
                f"tau_drift {tau}: {check:.0f} % of checks, {token:.1f} % of tokens"
                for tau, (check, token) in rates_of.items()
            ),
            "yes" if least <= 2 * RARE else "no",
        ],
        [
            f"no severe stalls: P99 at most {TAIL:g} times P95 from 32K to 224K (Table 9)",
            "; ".join(tails),
            "yes" if worst <= 1.1 * TAIL else "no",
        ],
    ]
    return table(["the paper says", "here", "seen here"], lines)


def rates(made: list[dict[str, Any]]) -> dict[str, Any]:
    """Of contexts: checks, updates per check with a 95 % interval over them and per pivot and token, and quantiles of step times."""
    checks, updates = ([sum(one[name]) for one in made] for name in ("checks", "updates"))
    rate = ratio_estimate(updates, checks, range(len(made)))
    steps = [t for one in made for t in one["step_us"]]
    return {
        "checks": sum(checks),
        "per_check": rate.value,
        "interval": [max(0.0, rate.low), min(1.0, rate.high)],
        "contexts": len(made),
        "per_token": sum(updates) / (GENERATED * sum(len(one["checks"]) for one in made)),
        "step_ms": [quantile(steps, share) / 1000 for share in (0.5, 0.95, 0.99)],
    }


def drift_line(found: dict[str, Any]) -> list[str]:
    low, high = found["interval"]
    return [
        str(found["checks"]),
        f"{100 * found['per_check']:.0f} ({100 * low:.0f}-{100 * high:.0f})",
        f"{100 * found['per_token']:.1f}",
        *[f"{value:.1f}" for value in found["step_ms"]],
    ]


# -- against OmniKV and ShadowKV ---------------------------------------------------------------------------------------


@torch.no_grad()
def room(bench: Bench, method: str, options: dict[str, Any], budget: float, length: int) -> dict[str, list[float]]:
    """What a question's first token reads in the layer that retrieves, of each of its parts: tokens of a unit, and unfolded per KV head."""
    compiled = bench.compiled.with_method(method, budget, config=bench.compiled.settings, **options)
    sample = make_sample(bench.tokenizer, "dense", length, 0, seed=0, questions=1)
    state = compiled.prefill(as_ids(sample.ids))
    compiled.extend(state, as_ids(sample.questions[0].ids))
    found = [max(row) for row in bench.profile.info.retrieval_heads.semantic]
    parts = state.rows[0].stores[found.index(max(found))]
    token = [part.site.values_per_token * compiled.placement.budget.dtype.itemsize for part in parts]
    return {
        "unit": [float(part.spans.lengths.float().median()) for part in parts],
        "unfolded": [part.workspace_nbytes / one for part, one in zip(parts, token)],
    }


def rooms(bench: Bench, figures: Figures, lines: Sequence[Line], length: int) -> list[dict[str, Any]]:
    """`room` of every line, by budget."""
    kept = []
    for budget in TIGHT:
        for label, method, options in lines:
            settings = {
                "method": method,
                "options": options,
                "budget": budget,
                "length": length,
            }
            held = figures.get("room", settings, lambda m=method, o=options, b=budget: room(bench, m, o, b, length))
            kept.append(settings | {"label": label, **held})
    return kept


def against_table(kept: list[dict[str, Any]], report: Report) -> str:
    """Answers, what is unfolded to give them, and what a step moves."""
    summaries = {(s.variant.label, s.variant.budget): s for s in report.summaries}
    lines = []
    for held in kept:
        summary = summaries[held["label"], held["budget"]]
        lines.append(
            [
                f"{100 * held['budget']:g} %",
                held["label"],
                percent(summary.accuracy),
                points(summary.ahead.get(STRICT_OWN)),
                spread(held["unit"]),
                spread(held["unfolded"]),
                size(summary.moved_per_step),
            ]
        )
    columns = [
        "budget",
        "variant",
        "mean, %",
        "against the first, points",
        "tokens of a unit",
        "tokens unfolded per head",
        "moved per step",
    ]
    return table(columns, lines)


def spread(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0f}" if round(low) == round(high) else f"{low:.0f} to {high:.0f}"


# -- costs -------------------------------------------------------------------------------------------------------------

COSTS = (
    Contender("clusters, W = 5", "heterocache", FAITHFUL, CLUSTERS),
    Contender("strict, clusters, W = 5", "heterocache", STRICT[0], {"strict": True} | CLUSTERS),
    Contender(OMNIKV, "omnikv", STRICT[0], {"strict": True}),
    Contender("cake", "cake", STRICT[0]),
)
SAID = (
    Direction(
        "first token as early as the full cache's (Fig. 4)",
        "first token, times full's",
        times_full(COSTS[0].label, "first_s"),
        lambda values: max(values) <= 1.1,
    ),
    Direction(
        "a step 3 times as fast as the full cache's at 224K (Fig. 4)",
        "step, times full's",
        times_full(COSTS[0].label, "step_ms"),
        lambda values: values[-1] < 1,
    ),
    Direction(
        "and gains on the full cache the longer the context",
        "full's step over it",
        lambda _, at: at["full"]["step_ms"] / at[COSTS[0].label]["step_ms"],
        rising,
    ),
    Direction(
        "40 times as fast as OmniKV (Sec. 5.3)",
        "OmniKV's step over `strict`'s",
        lambda _, at: at[OMNIKV]["step_ms"] / at[COSTS[1].label]["step_ms"],
        lambda values: values[-1] > 1,
    ),
    Direction(
        "host memory linear in the length: 5.9, 9.9, 18.0 GB at 32K to 128K (Table 7)",
        "host KiB per token",
        lambda length, at: at[COSTS[0].label]["host"] / length / 1024,
        lambda values: max(values) <= 1.2 * min(values),
    ),
    Direction(
        f"a link of {LINK / 1e9:g} GB/s does not slow it (Table 10)",
        "time on that link, % of a step",
        lambda _, at: 1e5 * at[COSTS[0].label]["moved"] / LINK / at[COSTS[0].label]["step_ms"],
        lambda values: max(values) <= 5,
    ),
)


# -- the page ----------------------------------------------------------------------------------------------------------


def thresholds_table(report: Report) -> str:
    """Every pair of thresholds against the paper's, on the same questions (Fig. 5)."""
    found = {s.variant.label: s for s in report.summaries}
    base = swept(0.5, 0.5)
    lines = []
    for stable, similar in itertools.product(STABLE, SIMILAR):
        summary = found[swept(stable, similar)]
        change = summary.ahead.get(base)
        lines.append(
            [
                f"{stable:g}",
                f"{similar:g}",
                percent(summary.accuracy),
                points(change),
                "-" if change is None else verdict(change, "equal"),
            ]
        )
    return table(["tau_stable", "tau_sim", "mean, %", "against 0.5 and 0.5, points", "equal"], lines)


def thresholds_verdict(report: Report) -> str:
    values = [s.accuracy.value for s in report.summaries if s.variant.budget is not None]
    return (
        "The paper's accuracy hardly depends on the thresholds (Fig. 5, a picture without figures). Seen here: "
        f"{'yes' if max(values) - min(values) <= EQUAL else 'no'}, answers are between {100 * min(values):.0f} and "
        f"{100 * max(values):.0f} %. Equal means within {100 * EQUAL:g} points."
    )


PREFIX = "transfer, "


def write_page(content: Mapping[str, Any], bench: Bench) -> Path:
    """The page and its picture, from what is measured so far: parts that the results lack are left out."""
    reports: Mapping[str, Report] = content["reports"]
    report = reports["ablations"]
    length = report.summaries[0].length
    pages = [
        "# HeteroCache on the bundled model",
        f"{length} tokens, question asked after compression, mean over the four families. Made by `benchmarks/{NAME}.py`; do not edit. "
        "Changes are paired on the same questions. `open` means that their 95 % interval, clustered by context, holds 0: the questions "
        "do not tell.",
        "## Roles (Fig. 6)",
        "The paper finds mostly satellites and few volatile heads at 0.5 and 0.5; seen here: no. Here heads look at what is asked now, so "
        "that no head's top set stays half the same, and heads of one layer share a quarter to two fifths of theirs, and only in the "
        "first layer more than half: at the paper's thresholds nearly every head is volatile and stays whole. What suits this model is a "
        "`tau_sim` between what its heads share and what chance would give (a tenth): then each layer has a pivot and satellites.",
        role_table(bench.profile),
        "## What works, and the ablations of Table 4",
        "The faithful method keeps pivots whole, so that clusters cost a quarter of the KV before anything else; below that, three pivots "
        "are the least with which the retrieving layer still has one. `strict` folds pivots and volatile heads too, into pages that are "
        "found by their mean keys, and so runs at 10 and 20 %. Questions here are ten tokens long and look elsewhere with every token: "
        "satellites that may follow every fifth step come late, so that `W = 1` is shown beside the paper's 5.",
        claims_table(report, CLAIMS),
        allocation(bench),
        markdown(report),
    ]
    if "thresholds" in reports:
        sweep = reports["thresholds"]
        curves = {
            f"tau_stable {stable:g}": curve(sweep, STRICT[0], {similar: swept(stable, similar) for similar in SIMILAR})
            for stable in STABLE
        }
        subtitle = f"{length} tokens, strict, {100 * STRICT[0]:g} % of the KV, question unseen"
        draw_curves(DOCS / NAME / "thresholds.png", "HeteroCache: thresholds of the roles", subtitle, "tau_sim", curves)
        pages += [
            "## Thresholds (Fig. 5)",
            thresholds_verdict(sweep)
            + " At `tau_sim` 0.28 three of the retrieving layer's four heads are a cluster and the fourth, volatile at `tau_stable` 0.5, "
            "has pages of its own; at 0.5 there is no cluster, and with `tau_stable` 0.001 all four are anchors, whose static choice was "
            "made before the question was asked.",
            thresholds_table(sweep),
            f"![thresholds]({NAME}/thresholds.png)",
        ]
    if "room" in content:
        pages += [
            "## Against OmniKV",
            "Both without whole heads (`strict`). OmniKV's filter is the layer that retrieves: it ranks single tokens by the true "
            "attention of each query to all keys, computed on the host, so that its index takes nothing of the budget. HeteroCache's "
            "volatile heads and pivots rank pages by mean keys that stay on the device, each head by its own: pages grow until their "
            "index takes no more than half of the head's budget, and what is left has room for few of them. An index of 8 "
            "bits doubles the pages, "
            "and answers fall at every budget. A uniform allocation gives the heads of this layer up to 1.8 times the room, "
            "which is worth 8 points at "
            "10 % and nothing beyond the interval below. In the last line OmniKV's layers have each their own part of the budget, as "
            "HeteroCache's do and as all have now: it still answers all, so that this is not what the distance is made of. "
            "Tokens are of the layer that retrieves, over its heads, at a question's "
            "first token.",
            against_table(content["room"], reports["against"]),
        ]
    if "room_shadowkv" in content:
        pages += [
            "## Against ShadowKV",
            "Both find pages by the mean of their keys. What ShadowKV has and `strict` has not, taken away one by one: the chunks that "
            "their mean describes worst stay exact; two thirds of the budget, in place of half, go to what is not unfolded, index "
            "included; layers unfolded in one workspace in turn. `all three` takes them away together, and stands beside "
            "`uniform allocation`, in which all heads have the same room, as ShadowKV's have. These two unfold as much and answer alike: "
            "the three are what the distance is made of. What each weighs depends on the budget. Without the workspace a head has a "
            "quarter of the room, which costs answers at every budget. With half of the budget fixed pages are twice as large at 3 %, "
            "which costs about as much there, and no larger above. The exact chunks are worth nothing on this model; at 5 % they "
            "take the place that the index of smaller pages needs. `each layer its own room` is the form that remains.",
            against_table(content["room_shadowkv"], reports["against_shadowkv"]),
        ]
    if "drift" in content:
        pages += [
            "## Drift (App. D.4)",
            f"{GENERATED} tokens sampled behind each of {CONTEXTS} contexts of a family, clusters, W = 5, {100 * FAITHFUL:g} % of the KV. "
            f"The paper reports a trigger rate of {RARE:g} % over 1K tokens, without saying of what; both readings are given. "
            "An update needs the median overlap of 5 steps below `tau_drift`; the paper takes `tau_stable`, 0.5. In brackets: 95 % "
            "interval over contexts.",
            drift_table(content["drift"]),
            drift_verdicts(content["drift"]),
        ]
    moved = {name.removeprefix(PREFIX): one for name, one in reports.items() if name.startswith(PREFIX)}
    if moved and "overlap" in content:
        pages += [
            "## Transfer of the calibration (App. C.4, Table 5)",
            "The paper finds more than 80 % of the satellites again with other texts, without saying of which set, and scores within 0.1 "
            "of each other. Over the smaller set is the overlap coefficient, the measure that the paper has for its top sets; a set that "
            "holds the other has 100 % there, so that the share of the larger set is given too. By chance: what random sets of these "
            "sizes would share.",
            overlap_table(content["overlap"], list(moved)),
            transfer_table(moved),
        ]
    if "costs" in content:
        costs = {int(n): at for n, at in content["costs"].items()}
        pages += [
            "## Time and memory by length (Fig. 4, Tables 7 and 10)",
            ABOUT
            + f"`{COSTS[0].label}` has {100 * FAITHFUL:g} % of the KV, the others {100 * STRICT[0]:g} %. Needles in plenty "
            "(Table 8): the columns `multi` and `confusable` above.",
            costs_table(costs),
            directions_table(costs, SAID),
            "This model of four layers has steps that are bound by the number of calls, and its full cache is small: against a full "
            "cache of 64K tokens in larger layers see [decode_cpu.md](decode_cpu.md). A GPU's link and its contention are not measured.",
        ]
    return write_document(NAME, *pages, "## Provenance", provenance_of(report, *reports.values(), figures=True))


def main() -> None:
    options = parser((__doc__ or "").splitlines()[0], page=True)
    options.add_argument("--text", type=Path, action="append", default=[], help="a calibration source; two of them")
    arguments = options.parse_args()
    if len(arguments.text) not in (0, 2):
        options.error(f"--text was given {len(arguments.text)} times: two sources are compared")
    bench = Bench(NAME, arguments)
    samples, length = arguments.samples or SAMPLES, arguments.length
    reports: dict[str, Report] = {}
    figures: dict[str, Any] = {}

    def publish() -> None:
        """Write what is measured so far."""
        write_parts(NAME, reports, figures)
        print(f"wrote {write_page(read_parts(NAME), bench)}", flush=True)

    if arguments.page:
        print(f"wrote {write_page(read_parts(NAME), bench)}")
        return
    reports["ablations"] = bench.run(ablations(samples, length), "HeteroCache")
    publish()
    reports["thresholds"] = bench.run(thresholds(samples, length), "HeteroCache, thresholds")
    publish()
    measured = Figures(arguments.rows / f"{NAME}.figures.jsonl", bench.identity)
    few = max(1, samples // 2)
    reports["against"] = bench.run(against(AGAINST_OMNIKV, few, length), "HeteroCache and OmniKV")
    figures["room"] = rooms(bench, measured, AGAINST_OMNIKV, length)
    publish()
    reports["against_shadowkv"] = bench.run(against(AGAINST_SHADOWKV, few, length), "HeteroCache and ShadowKV")
    figures["room_shadowkv"] = rooms(bench, measured, AGAINST_SHADOWKV, length)
    publish()
    figures["drift"] = drifts(bench, measured, length)
    publish()
    figures["overlap"], moved = transfer(arguments, bench, transferred(samples, length))
    reports |= {PREFIX + name: one for name, one in moved.items()}
    publish()
    figures["costs"] = by_length(bench, measured, COSTS)
    publish()


if __name__ == "__main__":
    main()
