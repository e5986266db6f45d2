"""Decode steps of this tree beside those of another one, in turns, so that what else the machine does meets both.

    python -m benchmarks.speed.step_against --other ../before --other-python ../before/.venv/bin/python  # 64K tokens, all methods
    python -m benchmarks.speed.step_against --other ... --other-python ... --length 4096 --methods quest --steps 8  # that it runs

An interrupted run goes on where it stopped. 16 GB of memory at 64K.

Each tree has a process of its own, which makes states as its own `decode_cpu.py` does: a decoder of 8 layers with random weights, states of
random keys and values, choices that overlap with the step before as text's do. They take turns, a few steps each. A method that needs what
no random profile has is left out, and named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib.places import RESULTS, ROOT

RESULT = RESULTS / "step_against.json"
BURST = 4
SERVE = """
import gc, json, sys, time
sys.path[:0] = [{folder!r}, {folder!r} + "/benchmarks"]
import torch
torch.set_num_threads({threads})
try:
    from benchmarks.speed import decode_cpu
except ModuleNotFoundError:  # a tree whose benchmarks lie in one folder
    import decode_cpu
from semkv.errors import SemkvError
from semkv.methods import METHODS
bench = decode_cpu.Bench(1, 1, 1e10)
records, held = {{}}, {{}}
print(json.dumps(sorted(METHODS)), file=sys.stderr, flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    try:
        if asked["do"] == "make":
            held.clear()
            gc.collect()
            if asked["length"] not in records:
                records.clear()
                records[asked["length"]] = decode_cpu.synthetic_record(asked["length"])
            decode_cpu.CONTENDERS.setdefault(asked["method"], {{}})
            budget = None if asked["method"] == "full" else asked["budget"]
            held["one"] = bench.ours(asked["method"], records[asked["length"]], budget)
            held["one"].warm(4)
            memory = held["one"].state.rows[0].budgeted()
            if asked["overlap"] and any(x.unfolds and x.spans is not None and x.spans.count for x in memory):
                held["one"].overlap(asked["overlap"])
            held["one"].warm(6)
            told = {{}}
        else:
            times = []
            for number in range(asked["steps"] + 1):
                started = time.perf_counter()
                held["one"].step()
                times.append(1000 * (time.perf_counter() - started))
            told = {{"times": times[1:]}}  # the first brings its own data to the caches
    except SemkvError as error:
        told = {{"refused": str(error)}}
    print(json.dumps(told), file=sys.stderr, flush=True)
"""


class Tree:
    """A process of one tree that makes states and takes steps."""

    def __init__(self, folder: Path, python: str, threads: int) -> None:
        self.folder = folder
        program = SERVE.format(folder=str(folder), threads=threads)
        self.process = subprocess.Popen(
            [python, "-W", "ignore", "-c", program],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            cwd=folder,
        )
        self.methods = self._told()

    def ask(self, **asked: Any) -> Any:
        """What the process answers."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return self._told()

    def _told(self) -> Any:
        assert self.process.stderr is not None
        said = []
        for line in self.process.stderr:
            if line.startswith(("{", "[")):
                return json.loads(line)
            said.append(line)
        raise SystemExit(f"the process of {self.folder} ended:\n{''.join(said[-20:])}")

    @property
    def commit(self) -> str:
        """Of the tree."""
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=self.folder, capture_output=True, text=True, check=True
        ).stdout.strip()


def main() -> None:
    """Take turns, print a line per method, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required=True, help="folder of the other tree")
    parser.add_argument("--other-python", required=True, help="its interpreter, in which that tree is installed")
    parser.add_argument("--length", type=int, default=65_536)
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument(
        "--overlap",
        type=float,
        default=0.95,
        help="share of a step's units that the step before had; 0: the own choice",
    )
    parser.add_argument("--methods", nargs="+", help="default: all")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help=f"results; default: {RESULT.name}, where all methods are measured")
    asked = parser.parse_args()
    trees = {
        "before": Tree(asked.other.resolve(), asked.other_python, asked.threads),
        "now": Tree(ROOT, sys.executable, asked.threads),
    }
    from semkv.evaluation.environment import describe, now

    started = now()
    out = asked.out or (None if asked.methods else RESULT)
    settings = {name: getattr(asked, name) for name in ("length", "budget", "overlap", "threads", "steps")}
    rows = earlier(out, settings)
    for method in asked.methods or trees["now"].methods:
        if any(row["method"] == method for row in rows):
            continue
        commits = {name: tree.commit for name, tree in trees.items()}
        rows.append({"method": method, **compare(trees, method, asked), "commits": commits})
        show(rows[-1])
        if out is not None:
            report = {"environment": describe(started).model_dump(mode="json"), **settings, "rows": rows}
            out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def earlier(out: Path | None, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an interrupted run with the same settings."""
    if out is None or not out.is_file():
        return []
    report = json.loads(out.read_text(encoding="utf-8"))
    return report["rows"] if all(report[name] == value for name, value in settings.items()) else []


def compare(trees: dict[str, Tree], method: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Steps of one method in both trees, in turns."""
    settings = {"method": method, "length": asked.length, "budget": asked.budget, "overlap": asked.overlap}
    for tree in trees.values():
        made = tree.ask(do="make", **settings)
        if "refused" in made:
            return made
    times: dict[str, list[float]] = {name: [] for name in trees}
    while len(times["now"]) < asked.steps:
        for name, tree in trees.items():
            times[name] += tree.ask(do="step", steps=BURST)["times"]
    medians, means = ({name: of(x) for name, x in times.items()} for of in (statistics.median, statistics.fmean))
    return {
        "median_ms": medians,
        "mean_ms": means,
        "faster": medians["before"] / medians["now"],
        "faster_by_means": means["before"] / means["now"],
    }


def show(row: dict[str, Any]) -> None:
    """A line of the table."""
    if "refused" in row:
        print(f"{row['method']:16} left out: {row['refused'].split(':')[0][:100]}", flush=True)
        return
    before, after = row["median_ms"]["before"], row["median_ms"]["now"]
    print(
        f"{row['method']:16} before {before:8.1f} now {after:8.1f} ms: {row['faster']:5.2f} times as fast "
        f"({row['faster_by_means']:.2f} by means)",
        flush=True,
    )


if __name__ == "__main__":
    main()
