"""Fill the table of results in README.md from benchmarks/results/grid.json.

python benchmarks/grid.py             # measures; hours, resumable
python benchmarks/readme_table.py     # writes
"""

from __future__ import annotations

from grids import EARLIER, MEASURED_EARLIER, RESULTS, ROOT, at_a_glance

from semkv.evaluation.schema import Report

SOURCE = RESULTS / "grid.json"
START = "<!-- results: written by `python benchmarks/readme_table.py` from benchmarks/results/grid.json -->"
END = "<!-- end of results -->"
PICTURE = "docs/results/grid/accuracy_unseen_4096.png"


def block(report: Report) -> str:
    """The paragraph and table for the README: mean over the task families, a line per method."""
    first = report.summaries[0]
    intro = (
        f"Exact answers in percent, by the share of the KV that may be on the device: the bundled model at {first.length} tokens, the "
        f"question asked after compression, {first.accuracy.samples} questions over {', '.join(first.families)}; in brackets 95 % "
        "intervals, clustered by context; a dash where a method cannot run. `auto` is what the profile's own measurement, on other "
        "contexts, chose. All methods of other papers are our implementations. Made by `benchmarks/grid.py`; more in "
        "[docs/results/grid.md](docs/results/grid.md)."
    )
    if "grid" in MEASURED_EARLIER:
        intro = f"{EARLIER} {intro}"
    picture = f"![Exact answers against the KV budget, per task family: some of the methods above]({PICTURE})"
    return f"{intro}\n\n{at_a_glance(report)}\n\n{picture}"


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
        raise SystemExit(f"{SOURCE} is missing: run `python benchmarks/grid.py` first")
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {readme}")


if __name__ == "__main__":
    main()
