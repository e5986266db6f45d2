"""What each part of SeKV is worth: Table 5 of its paper on the bundled model, at 4K tokens and 10 % of the full KV.

    python -m benchmarks.quality.ablations                     # an interrupted run goes on
    python -m benchmarks.quality.ablations --grids             # also the grids of Table 7: rank, alpha, window
    python -m benchmarks.quality.ablations --page              # the page alone, from the results that are there

50 questions per family, asked after compression. Writes benchmarks/results/ablations.json, docs/results/ablations.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.grids import (
    FAMILIES,
    Bench,
    parser,
    provenance_of,
    read_results,
    table,
    write_document,
    write_results,
)
from benchmarks.quality.quality import points
from semkv.evaluation import Grid, Report, Variant
from semkv.evaluation.schema import Interval, Summary
from semkv.evaluation.tables import markdown, percent

BUDGET = 0.1
SAMPLES = 50


@dataclass(frozen=True)
class Switch:
    """One ablation: options of `sekv`, what it is compared with, and the paper's change on NIAH and RULER in points."""

    label: str
    options: dict[str, Any]
    niah: float
    ruler: float
    base: str = "paper"
    note: str = field(default="", compare=False)


PAPER = "paper"
"""The base: SeKV as its paper has it, `method_options={"preset": "paper"}`."""
# Table 5: SeKV has 91.17 on NIAH and 87.34 on RULER.
SWITCHES = (
    Switch("fixed chunks", {"entropy": False}, 86.42 - 91.17, 83.61 - 87.34),
    Switch("no anchors", {"anchors": False}, 87.31 - 91.17, 84.28 - 87.34),
    Switch("no surprisal weights", {"weights": "uniform"}, 88.14 - 91.17, 85.02 - 87.34),
    Switch("mean-pooled routing summary", {"routing": "mean"}, 88.43 - 91.17, 85.21 - 87.34),
    Switch("global threshold", {"shared_threshold": True}, 87.82 - 91.17, 84.57 - 87.34),
    Switch("no SVD (coarse only)", {"unfold": False}, 83.47 - 91.17, 80.92 - 87.34),
    Switch("untrained W", {"router": "untrained"}, 85.96 - 91.17, 82.73 - 87.34),
    Switch("W as training begins", {"router": "initial"}, 85.96 - 91.17, 82.73 - 87.34),
    Switch("no W (mean key)", {"router": "coarse"}, 85.96 - 91.17, 82.73 - 87.34),
)
BASES = ((PAPER, {}),)
# Table 7: NIAH and RULER by value; the default's row is the base of the others.
TABLE_7: dict[str, dict[float, tuple[float, float]]] = {
    "max_rank": {8: (87.64, 83.94), 16: (89.83, 85.76), 32: (91.17, 87.34), 64: (91.42, 87.61)},
    "alpha": {0.5: (89.42, 85.71), 1.0: (91.17, 87.34), 1.5: (90.36, 86.42), 2.0: (88.74, 84.83)},
    "window": {256: (89.96, 86.21), 512: (91.17, 87.34), 1024: (91.31, 87.46)},
}
DEFAULTS = {"max_rank": 32, "alpha": 1.0, "window": 512}
GRIDS = tuple(
    Switch(
        f"{name} {value}",
        {name: value},
        niah - TABLE_7[name][DEFAULTS[name]][0],
        ruler - TABLE_7[name][DEFAULTS[name]][1],
        base=f"{name} {DEFAULTS[name]}",
    )
    for name, values in TABLE_7.items()
    for value, (niah, ruler) in values.items()
)


def grid(samples: int, length: int, with_grids: bool) -> Grid:
    """All variants of the benchmark."""
    named = [*BASES, *[(switch.label, switch.options) for switch in SWITCHES]]
    if with_grids:
        named += [(switch.label, switch.options) for switch in GRIDS]
    variants = [
        Variant(method="sekv", budget=BUDGET, label=label, options={"preset": "paper", **options})
        for label, options in named
    ]
    return Grid(variants=(Variant(method="full"), *variants), families=FAMILIES, lengths=(length,), samples=samples)


def direction(change: Interval) -> str:
    """`lower`, `higher`, or `open` where the interval holds 0."""
    if change.low is None or change.high is None or change.low <= 0.0 <= change.high:
        return "open"
    return "lower" if change.value < 0 else "higher"


def switch_table(report: Report, switches: Sequence[Switch] = SWITCHES) -> str:
    """Each switch: accuracy, change against its base on the same questions, and whether the paper says the same."""
    found: dict[str, Summary] = {s.variant.label: s for s in report.summaries}
    lines = []
    for switch in switches:
        summary = found.get(switch.label)
        change = summary.ahead.get(switch.base) if summary is not None else None
        if summary is None or change is None:
            continue
        ours = direction(change)
        theirs = "lower" if switch.niah < 0 else "higher"
        same = "yes" if ours == theirs else "no"
        if ours == "open":
            same = "same sign" if change.value * switch.niah > 0 else "not seen"
        lines.append(
            [
                switch.label,
                switch.base,
                percent(summary.accuracy),
                points(change),
                ours,
                f"{switch.niah:+.1f} / {switch.ruler:+.1f}",
                same,
            ]
        )
    columns = [
        "switch",
        "against",
        "mean, %",
        "change, points",
        "direction",
        "paper, NIAH / RULER",
        "paper says the same",
    ]
    return table(columns, lines)


def write_page(report: Report) -> Path:
    """The page, from the results."""
    length = report.summaries[0].length
    with_grids = any(summary.variant.label == GRIDS[0].label for summary in report.summaries)
    return write_document(
        "ablations",
        "# What each part of SeKV is worth",
        f"{length} tokens, {100 * BUDGET:g} % of the full KV, question asked after compression, mean over "
        "the four families. Made by `benchmarks/quality/ablations.py`; do not edit. Changes are paired on the same questions; "
        "`open` means that their 95 % interval, clustered by context, holds 0. The paper's figures are of its Table 5 "
        "(Qwen2.5-14B, 10 %): every switch lowers the score there.",
        switch_table(report),
        "All are against the preset `paper`: boundaries are anchors, short spans exact, spans are factored and unfold above their "
        "heads' thresholds, and alpha is the lowest that the budget affords. Fixed chunks are as many, and as many tokens are exact. A "
        "global threshold takes the place of thresholds and offsets of all heads. The paper trains each variant anew; here the switches "
        "act on one trained profile. `untrained W` draws the router at random, as the paper's row does; the two rows below it leave it "
        "where training begins, and do without.",
        "## Grids (Table 7)",
        "Each value against the paper's default. In the paper less rank, another alpha and a smaller window cost answers, while more rank "
        "than 32 and a larger window than 512 gain a few tenths of a point. Some values change nothing because the budget decides first: "
        "`alpha` where it affords fewer boundaries than that, `window` where it affords fewer tokens.",
        switch_table(report, GRIDS) if with_grids else "Not measured: `--grids`.",
        "## All figures",
        markdown(report),
        "## Provenance",
        provenance_of(report),
    )


def main() -> None:
    options = parser(__doc__.splitlines()[0], page=True)
    options.add_argument("--grids", action="store_true", help="also the grids of Table 7")
    arguments = options.parse_args()
    if not arguments.page:
        bench = Bench("ablations", arguments)
        found = bench.run(grid(arguments.samples or SAMPLES, arguments.length, arguments.grids), "Ablations")
        write_results("ablations", found)
    print(f"wrote {write_page(read_results('ablations'))}")


if __name__ == "__main__":
    main()
