"""The page of a real model's long table, from the results of real_table.py and kvpress's answers to the same questions.

python -m benchmarks.quality.real_page smollm2        # benchmarks/results/real_smollm2.json to docs/results/real_smollm2.md

Where there are rows of kvpress_run.py, what they say goes to benchmarks/results/real_peers_MODEL.json first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from benchmarks.lib.grids import measured_on, provenance_of, read_results, table, write_document
from benchmarks.lib.places import RESULTS, ROOT
from benchmarks.lib.real_model import MODELS
from benchmarks.peers.setting import kvpress_versions
from benchmarks.quality.real import GAIN, gained
from benchmarks.quality.real_table import ABLE, BUDGETS, NEEDLES, STRICT, able, standing
from semkv.evaluation import Report
from semkv.evaluation.environment import describe, now
from semkv.evaluation.gain import FAR_NATS
from semkv.evaluation.schema import CellResult, Interval
from semkv.evaluation.statistics import Estimate, proportion, ratio_estimate
from semkv.evaluation.tables import percent


class Line(BaseModel, frozen=True):
    """One method at one budget and length. needles: by task; texts: contexts that the gain is of."""

    length: int
    budget: float | None
    label: str
    package: str
    needles: dict[str, Interval]
    every: Interval | None
    far: Interval | None
    texts: int

    def kept(self, names: Sequence[str], full: Line) -> str:
        """Right answers in the tasks `names`, in percent of what the full cache gives to as many questions."""
        own = [(self.needles[name], full.needles[name]) for name in names if name in self.needles]
        right = sum(mine.value * mine.samples for mine, _ in own)
        whole = sum(theirs.value * mine.samples for mine, theirs in own)
        return f"{100 * right / whole:.0f}" if whole else "-"

    def standing(self, names: Sequence[str]) -> float:
        """See `real_table.standing`."""
        return standing([self.needles[name].value for name in names if name in self.needles], [self.every, self.far])


class Peers(BaseModel, frozen=True):
    """What kvpress answered. environment: where; packages: on its side; failed: presses that cannot run, and why."""

    environment: dict[str, Any]
    packages: list[str]
    failed: dict[str, str]
    lines: list[Line]


def ours(cells: Sequence[CellResult], length: int, budget: float | None) -> list[Line]:
    """Our methods at one budget and length."""
    found: dict[str, dict[str, CellResult]] = {}
    for cell in cells:
        if (cell.cell.length, cell.cell.variant.budget) == (length, budget):
            found.setdefault(cell.cell.variant.label, {})[cell.cell.family] = cell
    lines = []
    for label, at in found.items():
        text = at.get("perplexity")
        kept = None if text is None else text.recovered
        needles = {name: at[name].accuracy for name in NEEDLES if name in at}
        count = 0 if text is None else text.accuracy.contexts
        gains_of = {"every": kept and kept.every, "far": kept and kept.far}
        lines.append(
            Line(length=length, budget=budget, label=label, package="semkv", needles=needles, texts=count, **gains_of)
        )
    return lines


def theirs(rows: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]], length: int) -> list[Line]:
    """kvpress at one length: needles found in what it wrote, and gain between its own full cache and its own StreamingLLM; without presses
    that were not asked in all tasks."""
    asked = {(s["family"], s["context"]): s["questions"][0] for s in samples}
    at: dict[tuple[str, float | None], dict[str, dict[int, Any]]] = {}
    for row in rows:
        if "error" in row:
            continue
        family, _, tokens = row["family"].partition(" ")
        if int(tokens) == length:
            own = at.setdefault((row["press"], row["budget"]), {})
            own.setdefault(family, {})[row["context"]] = row
    lines, whole = [], at.get(("full", None), {}).keys()
    for (press, budget), own in at.items():
        if not whole <= own.keys():
            continue
        needles = {}
        for name in NEEDLES:
            found = own.get(name, {})
            if found:
                scores = [share(row["text"][0], asked[f"{name} {length}", index]) for index, row in found.items()]
                needles[name] = Interval.of(proportion(scores, list(found)))
        every, far, texts = gains(own, at.get(("full", None), {}), at.get(("streaming_llm", budget), {}))
        known = {"needles": needles, "every": every, "far": far, "texts": texts}
        lines.append(Line(length=length, budget=budget, label=press, package="kvpress", **known))
    return lines


def peers_of(folder: Path) -> Peers:
    """What kvpress_run.py left in `folder`."""
    rows = [json.loads(line) for line in (folder / "kvpress.jsonl").read_text(encoding="utf-8").splitlines()]
    samples = json.loads((folder / "samples.json").read_text(encoding="utf-8"))["samples"]
    lengths = sorted({int(row["family"].split()[1]) for row in rows if "error" not in row})
    return Peers(
        environment=describe(now()).model_dump(mode="json"),
        packages=kvpress_versions(),
        failed={row["press"]: row["error"] for row in rows if "error" in row},
        lines=[line for length in lengths for line in theirs(rows, samples, length)],
    )


def share(text: str, question: Mapping[str, Any]) -> float:
    """Share of the references that a text holds, as RULER's needle tasks score."""
    held = [reference.lower() in text.lower() for reference in question["references"]]
    return sum(held) / len(held)


def gains(
    own: Mapping[str, Any], full: Mapping[str, Any], window: Mapping[str, Any]
) -> tuple[Interval | None, Interval | None, int]:
    """Recovered gain of all and of far tokens, and of how many texts (`semkv.evaluation.gain`)."""
    rows = {name: by.get("perplexity", {}) for name, by in (("own", own), ("full", full), ("window", window))}
    both = [index for index in rows["own"] if index in rows["full"] and index in rows["window"]]
    tokens = [
        (index, c - a, c - b)
        for index in both
        for a, b, c in zip(*(rows[name][index]["nats"][0] for name in ("own", "full", "window")))
    ]
    far = [token for token in tokens if token[2] > FAR_NATS]

    def ratio(of: list[tuple[int, float, float]]) -> Interval | None:
        if not of or sum(whole for _, _, whole in of) <= 0:
            return None
        contexts, mine, whole = zip(*of)
        estimate: Estimate = ratio_estimate(mine, whole, contexts)
        return Interval.of(estimate)

    return ratio(tokens), ratio(far), len(both)


def read_peers(model: str) -> Peers | None:
    """What was published of kvpress on this model's questions."""
    path = RESULTS / f"real_peers_{model}.json"
    return Peers.model_validate_json(path.read_text(encoding="utf-8")) if path.is_file() else None


def page(model: str, report: Report, peers: Peers | None) -> Path:
    """Write the page."""
    presses = [] if peers is None else peers.lines
    runs = {length: {x.label for x in presses if x.length == length} for length in {x.length for x in presses}}
    tried = max(map(len, runs.values()), default=0)
    parts = []
    for length in sorted({c.cell.length for c in report.cells}):
        cells = [c for c in report.cells if c.cell.length == length]
        names = able(cells)
        full = {line.label: line for line in ours(cells, length, None)}["full"]
        parts.append(
            f"## {length:,} tokens\n\nThe full cache finds "
            + ", ".join(f"{percent(full.needles[name])} % of `{name}`" for name in NEEDLES if name in full.needles)
            + f". Lines are ordered by the mean of {', '.join(f'`{name}`' for name in names) or 'no needle task'} and of the gain of all "
            "and of far tokens, each at most 100 %."
            + (
                f" Of kvpress's presses {len(runs[length])} of {tried} were run."
                if 0 < len(runs.get(length, ())) < tried
                else ""
            )
        )
        for budget in BUDGETS:
            lines = [*ours(cells, length, budget), *(x for x in presses if (x.length, x.budget) == (length, budget))]
            lines.sort(key=lambda line: -line.standing(names))
            shown = [
                [
                    f"`{line.label}`",
                    line.package,
                    line.kept(names, full),
                    gained(line.every),
                    gained(line.far),
                    *(percent(line.needles.get(name)) for name in NEEDLES),
                    f"{line.texts}, {sum(x.samples for x in line.needles.values())}",
                ]
                for line in lines
            ]
            columns = [
                "method",
                "package",
                "answers kept, %",
                "gain, all tokens",
                "gain, far tokens",
                *(f"`{name}`" for name in NEEDLES),
            ]
            parts += [f"### {100 * budget:g} %", table([*columns, "texts, questions"], shown)]
    return write_document(
        f"real_{model}",
        f"# {MODELS[model].name} at 3, 5 and 10 % of its memory",
        "Made by `benchmarks/quality/real_table.py` and `benchmarks/quality/real_page.py`; kvpress's lines by `benchmarks/peers/`. "
        "Do not edit.",
        "The context is read and compressed; then a text goes on, token by token, or a question comes. "
        + GAIN
        + " *Answers kept*: right ones in the needle tasks that the full cache answers at "
        f"{100 * ABLE:g} % or more, in percent of the full cache's. In brackets 95 % intervals, clustered by context. The last column "
        "says how many texts and questions a line is of: few in the first round, in which all take part; more for the best. "
        "Each is compared with all questions that the full cache was asked, so that a line of few may be a few points off. "
        "A method without a line has no room to work in at that budget and length.",
        "For semkv every layer holds and reads no more than the budget, indexes included; layers with a sliding window keep that window, "
        "and no budget counts them. For kvpress it is the share of the context's pairs that attention sees, with what follows on top. "
        "`auto`: what the profile takes at the budget. "
        f"{', '.join(f'`{name}`' for name in STRICT)} run with `strict`, so that nothing is whole; `omnikv` then computes the "
        "attention of its few filter layers on the host, over all tokens, which no budget counts. `ceiling`: true attention chooses, its "
        "index not charged.",
        *parts,
        "## Provenance",
        *report.notes,
        "Lines were added by several runs of `real_table.py`, each with `--publish` and its own `--lengths`, `--methods`, `--needles`, "
        "`--first` and `--whole`; the last of them is named. One with the defaults measures what is missing of both lengths.",
        provenance_of(report),
        *([] if peers is None else [f"kvpress: {', '.join(peers.packages)}. {measured_on(peers.environment)}"]),
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("model", choices=MODELS)
    options.add_argument("--rows", type=Path, default=ROOT / "runs", help="folder of rows (%(default)s)")
    asked = options.parse_args()
    report = read_results(f"real_{asked.model}")
    folder = asked.rows / f"peers_{asked.model}"
    if (folder / "kvpress.jsonl").is_file():
        made = peers_of(folder).model_dump_json(indent=1)
        (RESULTS / f"real_peers_{asked.model}.json").write_text(made + "\n", encoding="utf-8")
    print(f"wrote {page(asked.model, report, read_peers(asked.model))} from {RESULTS / f'real_{asked.model}.json'}")


if __name__ == "__main__":
    main()
