"""HeteroCache: role counts, trigger rate, transfer of the calibration, ablations, thresholds, costs by length.

    python -m benchmarks.reports.heterocache           # an interrupted run goes on
    python -m benchmarks.reports.heterocache --text one.txt --text other.txt       # calibrated on these instead
    python -m benchmarks.reports.heterocache --model PATH --profile PATH --source text.txt --text one.txt --text other.txt
    python -m benchmarks.reports.heterocache --page    # the page alone, from the results that are there

40 questions per family at 4K tokens, asked after compression. Without `--text`, the
two calibration sources are generated prose and task haystacks with their questions; another model has no other sources. Writes
benchmarks/results/reports_heterocache.json and docs/results/reports_heterocache.md, another model's with its name.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.claims import (
    EQUAL,
    WAYS,
    Claim,
    Figures,
    claims_table,
    curve,
    draw_curves,
    together,
    verdict,
    write_parts,
)
from benchmarks.lib.costs import (
    ABOUT,
    LINK,
    RISING,
    Contender,
    Direction,
    at_the_end,
    by_length,
    costs_table,
    directions_table,
    times_full,
    within,
)
from benchmarks.lib.grids import FAMILIES, Bench, parser, provenance_of, read_parts, table, write_document
from benchmarks.lib.places import DOCS
from benchmarks.quality.quality import points
from benchmarks.reports.head_drift import GENERATED, RARE, drift_table, drift_verdicts, drifts
from benchmarks.reports.head_transfer import ALWAYS, SIMILAR, overlap_table, roles_of, transfer, transfer_table
from semkv.evaluation import Grid, Report, Variant
from semkv.evaluation.subject import as_ids
from semkv.evaluation.tables import markdown, percent, size
from semkv.methods import find_method
from semkv.profiles.schema import Profile

NAME = "reports_heterocache"
SAMPLES = 40
LIVE = {"tau_drift": 0.5}
"""The paper's trigger: roles are told apart by other thresholds here, which it would follow."""
CLUSTERS = {"tau_stable": ALWAYS, "tau_similar": 0.2} | LIVE
FEW_PIVOTS = {"tau_stable": ALWAYS, "tau_similar": 0.28} | LIVE
EACH_STEP = {"every": 1}
FAITHFUL = 0.3
WHOLE = (0.3, 0.5)
"""The paper's budgets (Sec. 5.1), for models whose heads are not nearly all volatile."""
STRICT = (0.1, 0.2)
STABLE = (ALWAYS, 0.5)
TIGHT = (0.03, 0.05, 0.1)
TRANSFERRED = "clusters, W = 5"
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
    ("clusters, W = 5, uniform allocation", (FAITHFUL,), CLUSTERS | {"uniform": True}),
    ("clusters, no retrieval", (FAITHFUL,), CLUSTERS | {"retrieval": False}),
    ("three pivots, W = 1", (0.2,), FEW_PIVOTS | EACH_STEP),
    ("strict, the paper's thresholds", STRICT, {"strict": True}),
    ("strict, clusters, W = 5", STRICT[:1], {"strict": True} | CLUSTERS),
    ("strict, clusters, W = 1", STRICT, {"strict": True} | CLUSTERS | EACH_STEP),
    ("strict, clusters, no retrieval", STRICT[:1], {"strict": True, "retrieval": False} | CLUSTERS),
)
QASPER = {"uniform": "Qasper at 50 %: -1.0 (Table 4)", "static": "Qasper at 50 %: -0.7 (Table 4)"}
CLAIMS = (
    Claim("clusters, W = 5, uniform allocation", "clusters, W = 5", "lower", QASPER["uniform"], FAITHFUL),
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


def ablations(samples: int, length: int, more: Sequence[float] = ()) -> Grid:
    """Settings that work, and the two ablations of Table 4; the paper's thresholds at `more` budgets."""
    variants = [
        Variant(method="heterocache", budget=budget, label=label, options=options)
        for label, budgets, options in VARIANTS
        for budget in (*budgets, *(more if not options else ()))
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
            options={"strict": True, "tau_stable": stable, "tau_similar": similar} | LIVE,
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
    variant = Variant(method="heterocache", budget=FAITHFUL, label=TRANSFERRED, options=CLUSTERS)
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
        "Eq. 8 gives a head room by the inverse of its stability; how stable a head is and whether it retrieves are two things. "
        f"Layer {most}, the least stable, takes {given[most]:.0f} % of what clustered heads share, with retrieval scores of at most "
        f"{found[most]:.2f}; layer {retrieving}, whose heads retrieve most (up to {found[retrieving]:.2f}), takes "
        f"{given[retrieving]:.0f} %, where an even share is {100 / len(given):.0f} %."
    )


# -- against OmniKV and ShadowKV ---------------------------------------------------------------------------------------


@torch.no_grad()
def room(bench: Bench, method: str, options: dict[str, Any], budget: float, length: int) -> dict[str, list[float]]:
    """What a question's first token reads in the layer that retrieves, of each of its parts: tokens of a unit, and unfolded per KV head."""
    compiled = bench.compiled.with_method(method, budget, config=bench.compiled.settings, **options)
    sample = bench.sample(length)
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
            if not bench.serves(method, budget, options):
                continue
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
        summary = summaries.get((held["label"], held["budget"]))
        if summary is None:
            continue
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
        within(high=1.1),
    ),
    Direction(
        "a step 3 times as fast as the full cache's at 224K (Fig. 4)",
        "step, times full's",
        times_full(COSTS[0].label, "step_ms"),
        at_the_end(high=1),
    ),
    Direction(
        "and gains on the full cache the longer the context",
        "full's step over it",
        lambda _, at: at["full"]["step_ms"] / at[COSTS[0].label]["step_ms"],
        RISING,
    ),
    Direction(
        "40 times as fast as OmniKV (Sec. 5.3)",
        "OmniKV's step over `strict`'s",
        lambda _, at: at[OMNIKV]["step_ms"] / at[COSTS[1].label]["step_ms"],
        at_the_end(low=1),
    ),
    Direction(
        f"a link of {LINK / 1e9:g} GB/s does not slow it (Table 10)",
        "time on that link, % of a step",
        lambda _, at: 1e5 * at[COSTS[0].label]["moved"] / LINK / at[COSTS[0].label]["step_ms"],
        within(high=5),
    ),
)


# -- the page ----------------------------------------------------------------------------------------------------------


def thresholds_table(report: Report) -> str:
    """Every pair of thresholds against the paper's, on the same questions (Fig. 5)."""
    found = {s.variant.label: s for s in report.summaries}
    base = swept(0.5, 0.5)
    lines = []
    for stable, similar in itertools.product(STABLE, SIMILAR):
        summary = found.get(swept(stable, similar))
        if summary is None:
            continue
        change = summary.ahead.get(base)
        lines.append(
            [
                f"{stable:g}",
                f"{similar:g}",
                percent(summary.accuracy),
                points(change),
                "-" if change is None else verdict(change, *WAYS["equal"]),
            ]
        )
    return table(["tau_stable", "tau_sim", "mean, %", "against 0.5 and 0.5, points", "equal"], lines)


def thresholds_verdict(report: Report) -> str:
    """Whether answers are equal at every pair of thresholds, each against the paper's."""
    changes = [s.ahead.get(swept(0.5, 0.5)) for s in report.summaries if s.variant.label != swept(0.5, 0.5)]
    found = together(verdict(change, *WAYS["equal"]) for change in changes if change is not None)
    return (
        f"The paper's accuracy hardly depends on the thresholds (Fig. 5, a picture without figures). Here: {found}. Equal means within "
        f"{100 * EQUAL:g} points."
    )


PREFIX = "transfer, "


def satellites_line(profile: Profile) -> str:
    """How many heads follow another at the paper's thresholds, which finds most of them there."""
    found = Counter(role for row in roles_of(profile, 0.5, 0.5) for role in row)
    return (
        f"At 0.5 and 0.5 the paper finds mostly satellites and few volatile heads; here {found['satellite']} of {found.total()} heads are "
        f"satellites and {found['volatile']} volatile."
    )


def write_page(content: Mapping[str, Any], bench: Bench) -> Path:
    """The page and its picture, from what is measured so far: parts that the results lack are left out."""
    reports: Mapping[str, Report] = content["reports"]
    report, name = reports["ablations"], bench.name
    length = report.summaries[0].length
    pages = [
        f"# HeteroCache on {bench.title}",
        f"{length} tokens, question asked after compression, mean over {', '.join(report.summaries[0].families)}. Made by "
        f"`benchmarks/reports/heterocache.py`; do not edit. "
        "Changes are paired on the same questions. `open` means that their 95 % interval, clustered by context, does not tell. "
        f"Where `tau_stable` is not the paper's, `tau_drift` is {LIVE['tau_drift']:g} all the same.",
        "## Roles (Fig. 6)",
        satellites_line(bench.profile),
        *bench.of_bundled(
            "Heads of this model look at what is asked now. What suits it is a "
            "`tau_sim` between what its heads share and what chance would give (a tenth): then each layer has a pivot and satellites."
        ),
        role_table(bench.profile),
        "## What works, and the ablations of Table 4",
        "The faithful method keeps pivots and volatile heads whole. `strict` folds them too, into pages that are found by their mean "
        "keys, so that any budget will do. A question is a few tokens long, and satellites may follow every fifth step: `W = 1` is shown "
        "beside the paper's 5.",
        claims_table(report, CLAIMS),
        *bench.left_out(),
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
        draw_curves(DOCS / name / "thresholds.png", "HeteroCache: thresholds of the roles", subtitle, "tau_sim", curves)
        pages += [
            "## Thresholds (Fig. 5)",
            thresholds_verdict(sweep),
            thresholds_table(sweep),
            f"![thresholds]({name}/thresholds.png)",
        ]
    if "room" in content:
        pages += [
            "## Against OmniKV",
            "Both without whole heads (`strict`). OmniKV's filter ranks single tokens by the true "
            "attention of each query to all keys, computed on the host, so that its index takes nothing of the budget. HeteroCache's "
            "volatile heads and pivots rank pages by mean keys that stay on the device, each head by its own: pages grow until their "
            "index takes no more than half of the head's budget. Tokens are of the layer that retrieves, over its heads, at a question's "
            "first token.",
            against_table(content["room"], reports["against"]),
        ]
    if "room_shadowkv" in content:
        pages += [
            "## Against ShadowKV",
            "Both find pages by the mean of their keys. What ShadowKV has and `strict` has not, taken away one by one: the chunks that "
            "their mean describes worst stay exact; two thirds of the budget, in place of half, go to what is not unfolded, index "
            "included.",
            against_table(content["room_shadowkv"], reports["against_shadowkv"]),
        ]
    if "drift" in content and "rates" in content["drift"][0]:
        pages += [
            "## Drift (App. D.4)",
            f"{GENERATED} tokens sampled behind each context, clusters, W = 5, {100 * FAITHFUL:g} % of the KV. "
            f"The paper reports a trigger rate of {RARE:g} % over 1K tokens, without saying of what; both readings are given. "
            "An update needs the median overlap of 5 steps below `tau_drift`; the paper takes `tau_stable`, 0.5. In brackets: 95 % "
            "interval over contexts.",
            drift_table(content["drift"]),
            drift_verdicts(content["drift"]),
        ]
    moved = {part.removeprefix(PREFIX): one for part, one in reports.items() if part.startswith(PREFIX)}
    if moved and "overlap" in content:
        pages += [
            "## Transfer of the calibration (App. C.4, Table 5)",
            "The paper finds more than 80 % of the satellites again with other texts, without saying of which set, and scores within 0.1 "
            "of each other. Over the smaller set is the overlap coefficient, the measure that the paper has for its top sets; a set that "
            "holds the other has 100 % there, so that the share of the larger set is given too. By chance: what random sets of these "
            "sizes would share. A share is judged by its Wilson interval over heads.",
            overlap_table(content["overlap"], list(moved)),
            transfer_table(moved, content.get("transfer_change")),
        ]
    if "costs" in content:
        costs = {int(n): at for n, at in content["costs"].items()}
        pages += [
            "## Time and memory by length (Fig. 4, Tables 7 and 10)",
            ABOUT + f"`{COSTS[0].label}` has {100 * FAITHFUL:g} % of the KV, the others {100 * STRICT[0]:g} %.",
            costs_table(costs),
            directions_table(costs, SAID),
            *bench.of_bundled(
                "This model of four layers has steps that are bound by the number of calls, and its full cache is small: against a full "
                "cache of 64K tokens in larger layers see [decode_cpu.md](decode_cpu.md)."
            ),
            "A GPU's link and its contention are not measured.",
        ]
    return write_document(name, *pages, "## Provenance", provenance_of(report, *reports.values(), figures=True))


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
        write_parts(bench.name, reports, figures)
        print(f"wrote {write_page(read_parts(bench.name), bench)}", flush=True)

    if arguments.page:
        print(f"wrote {write_page(read_parts(bench.name), bench)}")
        return
    reports["ablations"] = bench.run(ablations(samples, length, () if bench.is_bundled else WHOLE), "HeteroCache")
    publish()
    reports["thresholds"] = bench.run(thresholds(samples, length), "HeteroCache, thresholds")
    publish()
    measured = Figures(arguments.rows / f"{bench.name}.figures.jsonl", bench.identity)
    few = max(1, samples // 2)
    reports["against"] = bench.run(against(AGAINST_OMNIKV, few, length), "HeteroCache and OmniKV")
    figures["room"] = rooms(bench, measured, AGAINST_OMNIKV, length)
    publish()
    reports["against_shadowkv"] = bench.run(against(AGAINST_SHADOWKV, few, length), "HeteroCache and ShadowKV")
    figures["room_shadowkv"] = rooms(bench, measured, AGAINST_SHADOWKV, length)
    publish()
    if bench.serves("heterocache", FAITHFUL, CLUSTERS):
        figures["drift"] = drifts(bench, measured, FAITHFUL, CLUSTERS, length)
        publish()
        if bench.is_bundled or arguments.text:
            figures["overlap"], moved, figures["transfer_change"] = transfer(
                arguments, bench, transferred(samples, length)
            )
            reports |= {PREFIX + name: one for name, one in moved.items()}
            publish()
    figures["costs"] = by_length(bench, measured, COSTS)
    publish()


if __name__ == "__main__":
    main()
