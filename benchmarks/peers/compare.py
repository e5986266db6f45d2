"""kvpress and semkv on the same checkpoint, contexts, questions and budgets, side by side.

    bash benchmarks/peers/kvpress_env.sh            # once: an environment for kvpress
    python -m benchmarks.peers.export_samples       # once: the checkpoint and the samples
    runs/peers/env/bin/python benchmarks/peers/kvpress_run.py runs/peers
    python -m benchmarks.peers.compare              # measures our side, an interrupted run goes on

Question unseen. Every share is of exact answers, greedy, with a clustered Wilson interval. The full cache is the control: both sides
have to answer the same questions with it. Writes benchmarks/results/peers.json and docs/results/peers.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.lib.grids import LENGTH, Bench, parser, table, write_document
from benchmarks.lib.places import RESULTS
from benchmarks.peers.setting import (
    BUDGETS,
    FOLDER,
    THEIR_PYRAMIDKV,
    THEIR_SNAPKV,
    grid,
    kvpress_versions,
    label,
    label_on_top,
    share_of,
)
from semkv.evaluation.environment import describe, now
from semkv.evaluation.runner import cell_of
from semkv.evaluation.statistics import Estimate, proportion, ratio_estimate
from semkv.evaluation.store import RowStore

HERE = Path(__file__).resolve().parent
Place = tuple[str, int, int]
"""Family, context, question."""

OUR_CHUNKKV = label("chunkkv", {"chunk": 20, "reuse": 1, "window": 64})
PAIRS = (
    ("streaming_llm", "streaming_llm"),
    (label_on_top("streaming_llm", {}), "streaming_llm"),
    ("snapkv", "snapkv"),
    (label("snapkv", THEIR_SNAPKV), "snapkv"),
    (label_on_top("snapkv", THEIR_SNAPKV), "snapkv"),
    ("snapkv", "snapkv (window 32, kernel 7)"),
    ("pyramidkv", "pyramidkv"),
    ("pyramidkv", "pyramidkv (window 8)"),
    (label("pyramidkv", THEIR_PYRAMIDKV), "pyramidkv (window 8)"),
    (label_on_top("pyramidkv", THEIR_PYRAMIDKV), "pyramidkv (window 8)"),
    ("chunkkv", "chunkkv"),
    (OUR_CHUNKKV, "chunkkv"),
    ("chunkkv", "chunkkv (window 8, chunk 10)"),
    (label("chunkkv", {"reuse": 1}), "chunkkv (window 8, chunk 10)"),
)
"""(ours, theirs) of one method: as they come, one with the other's parameters, and ours with what is written on top of its budget."""


@dataclass
class Measured:
    """One method at one budget. matched: leading answer tokens that were right, per question; right: whether all were.

    cached: share of the context's keys and values in memory, the largest of any context; attended: those that attention sees.
    """

    side: str
    name: str
    budget: float | None
    matched: dict[Place, int] = field(default_factory=dict)
    right: dict[Place, bool] = field(default_factory=dict)
    cached: float = 0.0
    attended: float = 0.0

    def share(self, family: str | None = None) -> Estimate:
        """Right answers in one family, or the mean over families."""
        places = [place for place in self.right if family in (None, place[0])]
        return proportion(
            [self.right[place] for place in places], [place[:2] for place in places], strata=[p[0] for p in places]
        )


def their_rows(path: Path) -> tuple[list[Measured], dict[str, str]]:
    """What the run of kvpress left, and for presses that failed their errors."""
    found: dict[tuple[str, float | None], Measured] = {}
    failed = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "error" in row:
            failed[row["press"]] = row["error"].split(":")[0]
            continue
        one = found.setdefault((row["press"], row["budget"]), Measured("kvpress", row["press"], row["budget"]))
        for number, (matched, expected) in enumerate(zip(row["matched"], row["expected"])):
            place = (row["family"], row["context"], number)
            one.matched[place], one.right[place] = matched, matched == expected
        one.cached, one.attended = max(one.cached, row["cached"]), max(one.attended, row["attended"])
    return list(found.values()), failed


def our_rows(identity: str, store: RowStore) -> tuple[list[Measured], set[str]]:
    """What our grid's rows hold, and the commits they are of."""
    cells, found, commits = grid(), [], set()
    for variant in cells.variants:
        one = Measured("semkv", variant.label, share_of(variant.budget))
        for family in cells.families:
            key = cell_of(cells, identity, variant, family, LENGTH, "unseen").key
            for row in store.rows(key, range(cells.contexts)):
                commits.add(row.commit)
                one.cached = one.attended = max(one.cached, row.usage.device / row.usage.full)
                for number, answer in enumerate(row.answers):
                    one.matched[family, row.context, number] = answer.matched
                    one.right[family, row.context, number] = answer.correct
        if one.right:
            found.append(one)
    return found, commits


def find(measured: Iterable[Measured], side: str, name: str, budget: float | None) -> Measured | None:
    """The one of that name, where it was measured."""
    return next((one for one in measured if (one.side, one.name, one.budget) == (side, name, budget)), None)


def differing(ours: Measured, theirs: Measured) -> list[Place]:
    """Questions to which the two give a different number of right leading tokens, of those that both were asked."""
    return [place for place, count in ours.matched.items() if theirs.matched.get(place, count) != count]


def difference(ours: Measured, theirs: Measured) -> Estimate:
    """Right answers of ours less theirs on the questions that both were asked, mean over families, with a clustered t interval."""
    places = [place for place in ours.right if place in theirs.right]
    return ratio_estimate(
        [float(ours.right[p]) - float(theirs.right[p]) for p in places],
        [1.0] * len(places),
        [p[:2] for p in places],
        strata=[p[0] for p in places],
    )


def percent(estimate: Estimate) -> str:
    """`87 (81-92)`."""
    return f"{100 * estimate.value:.0f} ({100 * estimate.low:.0f}-{100 * estimate.high:.0f})"


def points(estimate: Estimate) -> str:
    """`+3 (-1 to +7)`."""
    return f"{100 * estimate.value:+.0f} ({100 * estimate.low:+.0f} to {100 * estimate.high:+.0f})"


def shares_table(measured: list[Measured], budget: float | None, families: tuple[str, ...]) -> str:
    """All of one budget, the best first."""
    lines = [
        [
            one.name,
            one.side,
            *[percent(one.share(family)) for family in families],
            percent(one.share()),
            f"{100 * one.attended:.1f}",
            f"{100 * one.cached:.1f}",
            str(len(one.right)),
        ]
        for one in sorted(measured, key=lambda one: -one.share().value)
        if one.budget == budget
    ]
    return table(["method", "package", *families, "mean", "attended, %", "in memory, %", "questions"], lines)


def pairs_table(measured: list[Measured]) -> str:
    """Methods that both packages have."""
    lines = []
    for ours, theirs in PAIRS:
        for budget in BUDGETS:
            one, other = find(measured, "semkv", ours, budget), find(measured, "kvpress", theirs, budget)
            if one is not None and other is not None:
                both = [place for place in one.right if place in other.right]
                apart = sum(one.right[place] != other.right[place] for place in both)
                cells = [percent(one.share()), percent(other.share()), points(difference(one, other))]
                lines.append([ours, theirs, f"{100 * budget:g} %", *cells, f"{apart} of {len(both)}"])
    return table(
        ["semkv", "kvpress", "budget", "semkv, %", "kvpress, %", "difference, points", "answers that differ"], lines
    )


def control(measured: list[Measured]) -> str:
    """A sentence on the full cache; refuses to compare where the two sides do not answer alike with it."""
    ours, theirs = find(measured, "semkv", "full", None), find(measured, "kvpress", "full", None)
    if ours is None or theirs is None:
        raise SystemExit("the full cache was not measured on both sides: nothing can be compared without the control")
    both = [place for place in ours.matched if place in theirs.matched]
    wrong = differing(ours, theirs)
    if wrong:
        raise SystemExit(
            f"with the full cache the two sides answer {len(wrong)} of {len(both)} questions differently: {wrong[:5]}"
        )
    return (
        f"The control: with the full cache both sides give the same number of right leading tokens to each of the {len(both)} "
        f"questions that both were asked, and answer {percent(ours.share())} % of them."
    )


def as_json(measured: list[Measured], families: tuple[str, ...]) -> list[dict[str, object]]:
    """Estimates of every method, budget and family."""
    return [
        {
            "package": one.side,
            "method": one.name,
            "budget": one.budget,
            "attended": one.attended,
            "cached": one.cached,
            "questions": len(one.right),
            "mean": asdict(one.share()),
            "families": {family: asdict(one.share(family)) for family in families},
        }
        for one in measured
    ]


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--folder", type=Path, default=FOLDER, help="where the rows of kvpress are")
    arguments: argparse.Namespace = options.parse_args()
    if not (arguments.folder / "kvpress.jsonl").is_file():
        options.error(f"--folder {arguments.folder}: no kvpress.jsonl there; benchmarks/peers/kvpress_run.py writes it")
    cells, started = grid(), now()
    bench = Bench("grid", arguments)  # the cells are the grid's, so what it measured need not be measured again
    if not arguments.report_only:
        bench.run(cells, "Our side of the comparison with kvpress")
    ours, commits = our_rows(bench.identity, RowStore(bench.rows))
    theirs, failed = their_rows(arguments.folder / "kvpress.jsonl")
    measured = [*ours, *theirs]
    said = control(measured)
    environment = describe(started)
    versions = kvpress_versions()
    content = {
        "environment": environment.model_dump(mode="json"),
        "commits": sorted(commits),
        "kvpress_environment": versions,
        "failed": failed,
        "methods": as_json(measured, cells.families),
    }
    (RESULTS / "peers.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    parts = [f"## {100 * budget:g} %\n\n{shares_table(measured, budget, cells.families)}" for budget in BUDGETS]
    path = write_document(
        "peers",
        "# kvpress and semkv side by side",
        f"The bundled model, {LENGTH} tokens, the question asked after compression; the same contexts, questions and greedy "
        "scoring on both sides. Made by `benchmarks/peers/`. Presses have kvpress's defaults, apart from what their names say; "
        "in brackets, 95 % intervals clustered by context. `attended` is the largest share of the context's keys and values that "
        "attention reads, `in memory` the share that stays in memory; for semkv both are the peak of a step over the full KV of "
        "all tokens so far. Lines with fewer questions have the first contexts of the others.",
        said,
        *parts,
        "## Methods that both have",
        pairs_table(measured),
        (HERE / "notes.md").read_text(encoding="utf-8"),
        "## Provenance",
        f"kvpress side: {', '.join(versions)}, float32, CPU. Our side: float32 weights, float16 KV; commits {', '.join(sorted(commits))}. "
        f"Machine: {environment.machine}. Finished {environment.finished}.",
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
