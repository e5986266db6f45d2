"""Whether SeKV's trained router and its coarse entries pay: each on and off at the same budget, on the same questions.

    python -m benchmarks.quality.sekv_defaults                                                    # the bundled model: minutes
    python -m benchmarks.quality.sekv_defaults --model PATH --profile PATH --source FOLDER        # another: needles, and text that goes on

Writes benchmarks/results/sekv_defaults.json and docs/results/sekv_defaults.md, another model's with its name. The defaults of `sekv` follow
from these: a part that is not seen to be worth its room is off.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.lib.claims import verdict
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
from semkv.evaluation import Grid, Report, Variant
from semkv.evaluation.schema import Interval, Summary
from semkv.evaluation.tables import markdown

NAME = "sekv_defaults"
SAMPLES = 24
BUDGETS = (0.03, 0.05, 0.1)
FORMS = {
    "neither": {},
    "trained router": {"router": "trained"},
    "coarse entries": {"coarse": True},
    "both": {"router": "trained", "coarse": True},
}
CHANGES = (
    ("neither", "trained router"),
    ("coarse entries", "both"),
    ("neither", "coarse entries"),
    ("trained router", "both"),
)
"""(without, with) a part, in the presence or absence of the other."""


def grid(samples: int, length: int) -> Grid:
    """The full cache, and every form at every budget."""
    variants = [
        Variant(method="sekv", budget=budget, label=label, options=options)
        for budget in BUDGETS
        for label, options in FORMS.items()
    ]
    return Grid(variants=(Variant(method="full"), *variants), families=FAMILIES, lengths=(length,), samples=samples)


def change(found: dict[tuple[str, float], Summary], budget: float, without: str, with_it: str) -> list[str] | None:
    """How much more is answered with the part, paired on the questions; None where one was not measured."""
    one, other = found.get((without, budget)), found.get((with_it, budget))
    lead: Interval | None = None if one is None or other is None else other.ahead.get(without)
    if one is None or other is None or lead is None or lead.low is None or lead.high is None:
        return None
    spread = f"{100 * lead.value:+.0f} ({100 * lead.low:+.0f} to {100 * lead.high:+.0f})"
    shares = [f"{100 * summary.accuracy.value:.0f}" for summary in (one, other)]
    return [f"{100 * budget:g} %", without, with_it, *shares, spread, verdict(lead, low=0.0)]


def write_page(report: Report, bench: Bench) -> Path:
    """The page, from the results."""
    found = {(s.variant.label, s.variant.budget): s for s in report.summaries if isinstance(s.variant.budget, float)}
    lines = [line for pair in CHANGES for budget in BUDGETS if (line := change(found, budget, *pair)) is not None]
    paired = [
        "Changes are paired on the same questions, with 95 % intervals clustered by context: a gain is `seen` where the interval lies "
        "above 0, `not seen` where it lies below, `open` where it holds 0.",
        table(["budget", "without", "with", "without, %", "with, %", "change, points", "a gain"], lines),
    ]
    return write_document(
        bench.name,
        f"# What the router's training and coarse entries are worth to SeKV, on {bench.title}",
        "Made by `benchmarks/quality/sekv_defaults.py`; do not edit. `neither` is the default of `sekv`: the router `coarse`, and folded "
        "spans that are seen when they unfold. Every layer holds and reads no more than the budget; the room that coarse values would take "
        "goes to more spans and more unfolded tokens.",
        *(paired if lines else ()),
        *bench.left_out(),
        markdown(report, heading="##"),
        "## Provenance",
        provenance_of(report),
    )


def main() -> None:
    arguments = parser((__doc__ or "").splitlines()[0], page=True).parse_args()
    bench = Bench(NAME, arguments)
    if not arguments.page:
        write_results(bench.name, bench.run(grid(arguments.samples or SAMPLES, arguments.length), "Defaults of SeKV"))
    print(f"wrote {write_page(read_results(bench.name), bench)}")


if __name__ == "__main__":
    main()
