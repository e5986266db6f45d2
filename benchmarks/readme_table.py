"""Fill the tables of results in README.md from benchmarks/results/real.json and grid.json.

make real ARGS=--publish              # measures on a real model; 20 minutes
python benchmarks/grid.py             # measures on the bundled one; hours, resumable
python benchmarks/readme_table.py     # writes
"""

from __future__ import annotations

from grids import EARLIER, MEASURED_EARLIER, RESULTS, ROOT, at_a_glance, table

from semkv.evaluation.schema import CellResult, Report

SOURCE, REAL = RESULTS / "grid.json", RESULTS / "real.json"
START = (
    "<!-- results: written by `python benchmarks/readme_table.py` from benchmarks/results/real.json and grid.json -->"
)
END = "<!-- end of results -->"
PICTURE = "docs/results/grid/accuracy_unseen_4096.png"


def real_block(report: Report) -> str:
    """A paragraph and a table of the real model: recovered gain and needles, a line per method."""
    found: dict[str, dict[tuple[float, str], CellResult]] = {}
    for cell in report.cells:
        variant = cell.cell.variant
        if variant.budget is not None:
            found.setdefault(variant.label, {})[variant.budget, cell.cell.family] = cell
    budgets = sorted({budget for own in found.values() for budget, _ in own})
    needles = next(name for own in found.values() for _, name in own if name != "perplexity")
    lines = []
    for label, own in found.items():
        gains = [own[b, "perplexity"].recovered if (b, "perplexity") in own else None for b in budgets]
        asked = [own.get((b, needles)) for b in budgets]
        lines.append([f"`{label}`", *("-" if x is None else f"{100 * x.every.value:.0f}" for x in gains)])
        lines[-1] += ["-" if x is None else f"{100 * x.accuracy.value:.0f}" for x in asked]
    columns = [f"{kind}, {100 * b:g} %" for kind in ("gain", "needles") for b in budgets]
    full = next(x for x in report.cells if x.cell.variant.budget is None and x.cell.family == needles)
    length, texts = report.cells[0].cell.length, max(cell.accuracy.contexts for cell in report.cells)
    intro = (
        f"**A real model**, SmolLM2-135M-Instruct at {length} tokens, by the share of the KV that may be on the device. *Gain*: how "
        "much of what the full cache gives to the text that follows, beyond first and recent tokens alone, a memory still gives, in "
        "percent (below 0: less than those alone). *Needles*: numbers found in the context, in percent; the full cache finds "
        f"{100 * full.accuracy.value:.0f}. {texts} texts and as many needles, a short look with wide intervals: "
        "[docs/results/real.md](docs/results/real.md), or `make real` on your machine. All methods: "
        "[docs/results/real_smollm2.md](docs/results/real_smollm2.md). `sketch` holds exact tokens in 8 bits, the "
        "others in 16. A dash where a method cannot run."
    )
    return f"{intro}\n\n{table(['method', *columns], lines)}"


def block(report: Report) -> str:
    """The paragraph and table for the README: mean over the task families, a line per method."""
    first = report.summaries[0]
    earlier = f" {EARLIER}" if "grid" in MEASURED_EARLIER else ""
    intro = (
        f"**The bundled model.**{earlier} Exact answers in percent, by the share of the KV that may be on the device, at {first.length} "
        f"tokens, the question asked after compression, {first.accuracy.samples} questions over {', '.join(first.families)}; in "
        "brackets 95 % intervals, clustered by context; a dash where a method cannot run. `auto` is what the profile's own "
        "measurement, on other contexts, chose. All methods of other papers are our implementations. Made by `benchmarks/grid.py`; "
        "more in [docs/results/grid.md](docs/results/grid.md)."
    )
    picture = f"![Exact answers against the KV budget, per task family: some of the methods above]({PICTURE})"
    return f"{intro}\n\n{at_a_glance(report)}\n\n{picture}"


def filled(text: str) -> str:
    """`text` with the part between START and END renewed."""
    if text.count(START) != 1 or text.count(END) != 1:
        raise SystemExit(f"README.md needs the lines {START!r} and {END!r} once each")
    before, rest = text.split(START)
    after = rest.split(END)[1]
    report = Report.model_validate_json(SOURCE.read_text(encoding="utf-8"))
    real = f"{real_block(Report.model_validate_json(REAL.read_text(encoding='utf-8')))}\n\n" if REAL.is_file() else ""
    return f"{before}{START}\n\n{real}{block(report)}\n\n{END}{after}"


def main() -> None:
    if not SOURCE.is_file():
        raise SystemExit(f"{SOURCE} is missing: run `python benchmarks/grid.py` first")
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {readme}")


if __name__ == "__main__":
    main()
