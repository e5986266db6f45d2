"""Fill the table of results in README.md from benchmarks/results/quality.json.

python benchmarks/quality.py          # measures; about an hour on one core
python benchmarks/readme_table.py     # writes
"""

from __future__ import annotations

from pathlib import Path

from semkv.evaluation.schema import Report, Summary
from semkv.evaluation.tables import percent, size

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "benchmarks" / "results" / "quality.json"
START = "<!-- results: written by `python benchmarks/readme_table.py` from benchmarks/results/quality.json -->"
END = "<!-- end of results -->"
PICTURE = "docs/results/quality/accuracy_unseen_4096.png"


def _device(report: Report, summary: Summary) -> float:
    """Largest device bytes of any family."""
    return max(
        c.usage.device for c in report.cells if c.cell.variant == summary.variant and c.cell.length == summary.length
    )


def block(report: Report) -> str:
    """The paragraph and table for the README: mean over the task families, a row per method and budget."""
    first = report.summaries[0]
    lines = [
        "| method | budget | exact answers, % | % of full | KV on the device | moved per step |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for summary in report.summaries:
        cells = [
            f"`{summary.variant.label}`", summary.variant.budget_text, percent(summary.accuracy), percent(summary.ratio),
            f"{size(_device(report, summary))} ({100 * summary.device_share:.1f} %)", size(summary.moved_per_step),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    intro = (
        f"The bundled model at {first.length} tokens, the question asked after compression, {first.accuracy.samples} questions over "
        f"{', '.join(first.families)}; in brackets 95 % intervals, clustered by context. Made by `benchmarks/quality.py`; "
        "the whole table is [docs/results/quality.md](docs/results/quality.md)."
    )
    picture = f"![Exact answers against the KV budget, per task family]({PICTURE})"
    return "\n".join([intro, "", *lines, "", picture])


def filled(text: str) -> str:
    """`text` with the part between START and END renewed."""
    if text.count(START) != 1 or text.count(END) != 1:
        raise SystemExit(f"README.md needs the lines {START!r} and {END!r} once each")
    before, rest = text.split(START)
    after = rest.split(END)[1]
    report = Report.model_validate_json(SOURCE.read_text(encoding="utf-8"))
    return f"{before}{START}\n\n{block(report)}\n\n{END}{after}"


def main() -> None:
    if not SOURCE.is_file():
        raise SystemExit(f"{SOURCE} is missing: run `python benchmarks/quality.py` first")
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {readme}")


if __name__ == "__main__":
    main()
