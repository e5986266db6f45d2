"""Fill the table of results in README.md from benchmarks/results/real_smollm2.json.

python -m benchmarks.quality.real_table smollm2 --profile profiles/smollm2_135m --publish     # measures; hours, adds to what is there
python -m benchmarks.quality.readme_table                                                     # writes
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.lib.grids import table
from benchmarks.lib.places import RESULTS, ROOT
from benchmarks.quality.real_page import Line, ours, read_peers
from benchmarks.quality.real_table import BUDGETS, able
from semkv.evaluation.schema import Report

SOURCE = RESULTS / "real_smollm2.json"
START = (
    "<!-- results: written by `python -m benchmarks.quality.readme_table` from benchmarks/results/real_smollm2.json -->"
)
END = "<!-- end of results -->"
LENGTH = 2048
PRESS = "`{}` of kvpress"
SHOWN = (
    *("ceiling", "auto", "omnikv", "shadowkv", "heterocache", "sekv", "quest"),
    *("sentencekv", "compresskv", "snapkv", "specontext"),
)
"""The five systems, and methods that many know; the page has all."""


def words_of(names: Sequence[str]) -> str:
    """Tasks as a sentence has them."""
    quoted = [f"`{name}`" for name in names]
    return " and ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1])))


def best_press(names: Sequence[str]) -> list[Line]:
    """The lines of the press of kvpress that stands highest on the mean, one for each budget; none where it was not measured."""
    peers = read_peers("smollm2")
    found: dict[str, list[Line]] = {}
    for line in [] if peers is None else peers.lines:
        if line.length == LENGTH and line.budget in BUDGETS:
            found.setdefault(line.label, []).append(line)
    return max(found.values(), key=lambda own: fmean(x.standing(names) for x in own), default=[])


def block(report: Report) -> str:
    """A paragraph and a table: answers kept and recovered gain, a line per method."""
    cells = [cell for cell in report.cells if cell.cell.length == LENGTH]
    names = able(cells)
    full = {line.label: line for line in ours(cells, LENGTH, None)}["full"]
    at: dict[float, dict[str, Line]] = {b: {line.label: line for line in ours(cells, LENGTH, b)} for b in BUDGETS}
    every = [line for lines in at.values() for label, line in lines.items() if label in SHOWN]
    press = best_press(names)
    for line in press:
        assert line.budget is not None
        at[line.budget][PRESS.format(line.label)] = line
    shown = [*SHOWN[:2], *dict.fromkeys(PRESS.format(line.label) for line in press), *SHOWN[2:]]
    sizes = [(sum(line.needles[name].samples for name in names if name in line.needles), line.texts) for line in every]
    (few, fewest), (questions, texts) = min(sizes), max(sizes)
    others = "" if few == questions else f"; the other methods, behind after a first round, at least {few} and {fewest}"
    lines = []
    for label in shown:
        found = [at[b].get(label) for b in BUDGETS]
        kept = ["-" if line is None else line.kept(names, full) for line in found]
        gain = ["-" if line is None or line.every is None else f"{100 * line.every.value:.0f}" for line in found]
        lines.append([label if label.startswith("`") else f"`{label}`", *kept, *gain])
    columns = [f"{kind}, {100 * b:g} %" for kind in ("answers", "gain") for b in BUDGETS]
    press_said = (
        f" kvpress is NVIDIA's library of such methods, of which `{press[0].label}` keeps most answers; the question and what follows "
        "come on top of its share."
        if press
        else ""
    )
    said = (
        f"SmolLM2-135M-Instruct, {LENGTH:,} tokens, by the share of the KV that may be on the device. The context is compressed before "
        f"anything is asked. `ceiling` and `auto` have {questions} questions and {texts} texts{others}. Intervals and all methods: "
        "[docs/results/real_smollm2.md](docs/results/real_smollm2.md).",
        "",
        f"- *Answers*: a number is hidden in the text and asked for (the *needle* tasks {words_of(names)}); of those that the full cache "
        "answers, in percent.",
        "- *Gain*: the full cache foretells the text that follows better than first and recent tokens alone do. How much of that lead a "
        "memory keeps, in percent; below 0 it does worse than those.",
        "- `ceiling`: true attention chooses, at no cost. `auto` is `sketch` here, which holds exact tokens in 8 bits, at 3 % in 4; all "
        "other methods hold them in 16. `heterocache`, `omnikv` and `specontext` run with `strict`; the attention of `omnikv`'s filters "
        f"is computed on the host, over all tokens. A dash where a method cannot run.{press_said}",
    )
    intro = "\n".join(said)
    return f"{intro}\n\n{table(['method', *columns], lines)}"


def filled(text: str) -> str:
    """`text` with the part between START and END renewed."""
    if text.count(START) != 1 or text.count(END) != 1:
        raise SystemExit(f"README.md needs the lines {START!r} and {END!r} once each")
    before, rest = text.split(START)
    report = Report.model_validate_json(SOURCE.read_text(encoding="utf-8"))
    return f"{before}{START}\n{block(report)}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {readme}")


if __name__ == "__main__":
    main()
