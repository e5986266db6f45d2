"""Accuracy of the four methods on the bundled model at 4K tokens, and what each part of `sekv` is worth.

    python -m benchmarks.quality.quality                       # about an hour on one core; an interrupted run goes on
    python -m benchmarks.quality.quality --families dense      # one family, as one of several processes
    python -m benchmarks.quality.quality --page                # the page alone, from the results that are there

Question unseen, 5, 10 and 20 % of the full KV. 200 questions per family for the methods; 50 for the parts: oracle
selection under the same segmentation and budget, raw spans only, and with coarse entries. Writes
benchmarks/results/quality.json, quality_parts.json and docs/results/quality.md with its pictures.
"""

from __future__ import annotations

from pathlib import Path

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
from benchmarks.lib.places import DOCS
from semkv.evaluation import Grid, Report, Variant, build_variants
from semkv.evaluation.plots import draw_all
from semkv.evaluation.schema import Interval, Summary
from semkv.evaluation.tables import markdown, percent

BUDGETS = (0.05, 0.1, 0.2)
METHODS = ("full", "streaming_llm", "snapkv", "sekv")
BARS = {0.05: 0.65, 0.1: 0.85, 0.2: 0.95}
LEAD = 0.20
PARTS = (
    ("sekv", {}),
    ("sekv, oracle selection", {"router": "oracle"}),
    ("sekv, raw spans only", {"forms": "raw"}),
    ("sekv, coarse entries", {"coarse": True}),
)


def grids(samples: int | None, length: int) -> tuple[Grid, Grid]:
    """The grid of methods and the grid of parts; the second reads its `full` and `sekv` from the first's rows."""
    common = {"families": FAMILIES, "lengths": (length,), "questions_per_context": 4}
    methods = Grid(variants=build_variants(METHODS, BUDGETS), samples=samples or 200, **common)
    parts = [
        Variant(method="sekv", budget=budget, label=label, options=options)
        for label, options in PARTS
        for budget in BUDGETS
    ]
    return methods, Grid(variants=(Variant(method="full"), *parts), samples=min(samples or 50, 50), **common)


def points(interval: Interval | None) -> str:
    """A difference of accuracies in points with its interval."""
    if interval is None:
        return "-"
    bounds = ""
    if interval.low is not None and interval.high is not None:
        bounds = f" ({100 * interval.low:+.0f} to {100 * interval.high:+.0f})"
    return f"{100 * interval.value:+.1f}{bounds}"


def verdicts(report: Report) -> str:
    """The bars beside what was measured."""
    found: dict[float, Summary] = {
        s.variant.budget: s
        for s in report.summaries
        if s.variant.label == "sekv" and isinstance(s.variant.budget, float)
    }
    lines = []
    for budget, bar in BARS.items():
        summary = found.get(budget)
        if summary is None or summary.ratio is None:
            continue
        leads = [summary.ahead.get(other) for other in ("streaming_llm", "snapkv")]
        met = summary.ratio.value >= bar and all(lead is not None and lead.value >= LEAD for lead in leads)
        lines.append(
            [
                f"{100 * budget:g} %",
                percent(summary.ratio),
                f"{100 * bar:.0f}",
                *[points(lead) for lead in leads],
                f"{100 * LEAD:+.0f}",
                "yes" if met else "no",
            ]
        )
    columns = ["budget", "sekv, % of full", "bar", "ahead of streaming_llm", "ahead of snapkv", "bar", "met"]
    return table(columns, lines)


def write_page(methods: Report, parts: Report) -> Path:
    """The page and its pictures, from the results."""
    length = methods.summaries[0].length
    pictures = draw_all(methods, DOCS / "quality")
    return write_document(
        "quality",
        "# Accuracy of the methods on the bundled model",
        f"{length} tokens, the question asked after compression. Made by `benchmarks/quality/quality.py`. "
        "The first table has the bars, set before anything was measured: mean over the four families, in percent of the full "
        "cache's accuracy on the same questions, and points ahead of the two other methods.",
        verdicts(methods),
        "## Methods",
        markdown(methods),
        "\n\n".join(f"![{picture.stem.replace('_', ' ')}](quality/{picture.name})" for picture in pictures),
        "## Parts of sekv",
        "`oracle selection` unfolds the spans with the most true attention: the ceiling of any router under this "
        "segmentation and budget. The other rows change one thing each; `sekv` itself stores spans in the smallest "
        "faithful form and attends to no coarse entries.",
        markdown(parts),
        "## Provenance",
        provenance_of(methods, parts),
        "" if parts.complete else "The parts are not complete: their tables tell how many questions each line has.",
    )


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], page=True).parse_args()
    if not arguments.page:
        bench = Bench("quality", arguments)
        of_methods, of_parts = grids(arguments.samples, arguments.length)
        write_results("quality", bench.run(of_methods, "Methods"))
        write_results("quality_parts", bench.run(of_parts, "Parts of sekv"))
    print(f"wrote {write_page(read_results('quality'), read_results('quality_parts'))}")


if __name__ == "__main__":
    main()
