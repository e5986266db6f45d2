"""Random journeys in threads of two processes, under random hostile surroundings, for minutes.

Results in full have to be those of the plain model, results of compressing methods their own of a calm process, which come first.
Exit code 1 where one is not, where anything raises, and where a process ends by a signal; the seed is printed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostile import Chaos, Surroundings
from journey import BUDGET, Desk, Forms, Journey, Result, all_journeys, difference

import semkv

KINDS = ("full", "compressed")
GRACE = 300
"""Seconds that a process may go on after its time."""

DRAWING = threading.Lock()
"""Held by a journey that draws from torch's own generator, which belongs to the process."""


@dataclass(frozen=True)
class Task:
    """A journey with the seed of its texts, in one of KINDS."""

    name: str
    seed: int
    kind: str

    @property
    def key(self) -> str:
        return f"{self.name} {self.seed} {self.kind}"


# -- calm results -------------------------------------------------------------------------------------------------------


def expected_results(tasks: list[Task], folder: Path) -> dict[str, Result]:
    """What `tasks` give in a process where nothing else happens; run in one."""
    model, words = semkv.bundled.load()
    forms, made = Forms(model), {}
    for number, task in enumerate(tasks):
        one, place = all_journeys()[task.name], folder / f"{os.getpid()} {number}"
        place.mkdir()
        if task.kind == "full":
            made[task.key] = one.expected(model, Desk(model, words, place, seed=task.seed))
        else:
            made[task.key] = one.run(forms(one.method), Desk(model, words, place, one.method, BUDGET, task.seed))
    return made


def calm(tasks: list[Task], folder: Path) -> dict[str, Result]:
    """`expected_results` by two processes."""
    begun = time.monotonic()
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(expected_results, [tasks[0::2], tasks[1::2]], [folder, folder]))
    print(f"{len(tasks)} expected results in {time.monotonic() - begun:.0f} s", flush=True)
    return parts[0] | parts[1]


# -- a process of threads ------------------------------------------------------------------------------------------------


class Log:
    """Lines of JSON that the parent reads; written whole, by any thread."""

    def __init__(self, path: Path) -> None:
        self.file, self.lock = path.open("a", encoding="utf-8"), threading.Lock()

    def __call__(self, **facts: Any) -> None:
        with self.lock:
            self.file.write(json.dumps(facts) + "\n")
            self.file.flush()


def run_task(task: Task, one: Journey, form: Any, desk: Desk, expected: Result) -> str | None:
    """What is wrong with a journey's result; None where nothing is."""
    try:
        return difference(one.run(form, desk), expected)
    except BaseException:  # KeyboardInterrupt too: a program that loses one is wrong
        return traceback.format_exc()


def work(
    thread: int,
    rng: random.Random,
    tasks: list[Task],
    expected: dict[str, Result],
    forms: Forms,
    words: Any,
    model: Any,
    folder: Path,
    until: float,
    log: Log,
) -> None:
    """Journeys drawn by `rng`, one after the other, until the time is over."""
    around = Surroundings(rng, folder)
    disturbed: dict[str, Any] = {}
    number = 0
    while time.time() < until:
        task = rng.choice(tasks)
        one = all_journeys()[task.name]
        method, budget = ("full", None) if task.kind == "full" else (one.method, BUDGET)
        if method not in disturbed:
            disturbed[method] = around.around(forms(method))
        place = folder / str(number)
        place.mkdir()
        desk = Desk(model, words, place, method, budget, task.seed)
        log(event="begin", thread=thread, number=number, key=task.key)
        with around.here():
            if one.draws:
                with DRAWING:
                    wrong = run_task(task, one, disturbed[method], desk, expected[task.key])
            else:
                wrong = run_task(task, one, disturbed[method], desk, expected[task.key])
        log(event="end", thread=thread, number=number, key=task.key, wrong=wrong)
        number += 1
    log(event="counts", thread=thread, counts=around.counts)


def process(
    name: str, seed: int, threads: int, seconds: float, tasks: list[Task], expected: dict[str, Result], folder: Path
) -> None:
    """One of the processes: its threads, and one that changes the defaults of all."""
    errors = (folder / f"{name}.err").open("w", encoding="utf-8")
    os.dup2(errors.fileno(), 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds + GRACE - 30, exit=False)
    log = Log(folder / f"{name}.jsonl")
    model, words = semkv.bundled.load()
    forms = Forms(model)
    for method in sorted({all_journeys()[task.name].method for task in tasks}):
        forms(method)
    log(event="ready")
    until = time.time() + seconds
    chaos = Chaos(random.Random(f"{seed} {name} chaos"))
    chaos.start()
    running = []
    for thread in range(threads):
        place = folder / f"{name} {thread}"
        place.mkdir()
        rng = random.Random(f"{seed} {name} {thread}")
        arguments = (thread, rng, tasks, expected, forms, words, model, place, until, log)
        running.append(threading.Thread(target=work, args=arguments))
        running[-1].start()
    for thread in running:
        thread.join()
    chaos.stop()
    log(event="done", turns=chaos.turns)


# -- the parent ----------------------------------------------------------------------------------------------------------


class Watch:
    """Reads what the processes write, and counts."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.files = {name: folder / f"{name}.jsonl" for name in names}
        self.read = dict.fromkeys(names, 0)
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.things: Counter[str] = Counter()
        self.running: dict[tuple[str, int], str] = {}
        self.ready: set[str] = set()
        self.finished: set[str] = set()

    def look(self) -> None:
        for name, path in self.files.items():
            if not path.exists():
                continue
            with path.open(encoding="utf-8") as file:
                file.seek(self.read[name])
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self.read[name] += len(whole.encode())
            for line in whole.splitlines():
                self._take(name, json.loads(line))

    def _take(self, name: str, line: dict[str, Any]) -> None:
        if line["event"] == "ready":
            self.ready.add(name)
        elif line["event"] == "begin":
            self.running[name, line["thread"]] = line["key"]
        elif line["event"] == "end":
            self.running.pop((name, line["thread"]), None)
            self.done[line["key"]] += 1
            if line["wrong"] is not None:
                self.failed[line["key"]] += 1
                print(f"WRONG: {line['key']} (process {name}, thread {line['thread']})\n{line['wrong']}", flush=True)
        elif line["event"] == "counts":
            self.things.update(line["counts"])
        elif line["event"] == "done":
            self.finished.add(name)
            self.things["changes of defaults"] += line["turns"]

    def line(self, minute: float) -> str:
        kinds = ", ".join(f"{kind} {sum(n for key, n in self.done.items() if key.endswith(kind))}" for kind in KINDS)
        return f"{minute:5.1f} min: {sum(self.done.values())} journeys ({kinds}), {sum(self.failed.values())} wrong"

    def table(self) -> str:
        names = sorted({key.split()[0] for key in self.done})
        lines = [f"{'journey':44} {'full':>6} {'compressed':>11} {'wrong':>6}"]
        for name in names:
            counts = [
                sum(n for key, n in self.done.items() if key.split()[0] == name and key.endswith(k)) for k in KINDS
            ]
            wrong = sum(n for key, n in self.failed.items() if key.split()[0] == name)
            lines.append(f"{name:44} {counts[0]:6} {counts[1]:11} {wrong:6}")
        lines.append(", ".join(f"{name} {count}" for name, count in sorted(self.things.items())))
        return "\n".join(lines)


def supervise(children: dict[str, Any], watch: Watch, seconds: float, folder: Path) -> list[str]:
    """Wait for the processes, a line per minute; what ended otherwise than it should."""
    begun, told = None, 0.0
    limit = time.monotonic() + seconds + 2 * GRACE
    while any(child.is_alive() for child in children.values()) and time.monotonic() < limit:
        time.sleep(0.5)
        watch.look()
        if begun is None and len(watch.ready) == len(children):
            begun = time.monotonic()
        if begun is not None and (time.monotonic() - begun) // 60 > told:
            told = (time.monotonic() - begun) // 60
            print(watch.line(told), flush=True)
        if any(child.exitcode not in (None, 0) for child in children.values()):
            break
    broken = []
    for name, child in children.items():
        hung = child.is_alive()
        if hung:
            child.kill()
        child.join()
        watch.look()
        if child.exitcode == 0 and name in watch.finished:
            continue
        how = f"exit code {child.exitcode}" if child.exitcode >= 0 else signal.Signals(-child.exitcode).name
        where = ", ".join(key for (process_name, _), key in watch.running.items() if process_name == name)
        last = (folder / f"{name}.err").read_text(encoding="utf-8")[-4000:]
        broken.append(f"process {name}: {'stopped while running' if hung else how}; in it: {where}\n{last}")
    return broken


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the journeys go on")
    parser.add_argument("--seed", type=int, default=None, help="of all choices; default: a new one, which is printed")
    parser.add_argument("--threads", type=int, default=4, help="of both processes together")
    parser.add_argument("--texts", type=int, default=2, help="texts of each journey")
    parser.add_argument(
        "--only", nargs="+", default=None, metavar="JOURNEY", help="journeys to draw from; default: all"
    )
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="what to draw; default: both")
    made = parser.parse_args(given)
    usual = [one.name for one in all_journeys().values() if not one.alone and not one.slow]
    unknown = sorted(set(made.only or ()) - set(usual))
    if unknown:
        parser.error(f"no such journeys: {', '.join(unknown)}; there are: {', '.join(usual)}")
    if made.minutes <= 0 or made.threads < 2 or made.texts < 1:
        parser.error("--minutes is more than 0, --threads 2 or more, --texts 1 or more")
    made.only = made.only or usual
    made.seed = random.SystemRandom().randrange(10**6) if made.seed is None else made.seed
    return made


def main() -> int:
    asked = arguments()
    print(f"seed {asked.seed}: {len(asked.only)} journeys, {asked.threads} threads in 2 processes", flush=True)
    tasks = [Task(name, seed, kind) for name in asked.only for seed in range(asked.texts) for kind in asked.kinds]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        expected = calm(tasks, folder)
        context, seconds = multiprocessing.get_context("spawn"), 60 * asked.minutes
        shares = {"A": asked.threads - asked.threads // 2, "B": asked.threads // 2}
        children = {
            name: context.Process(
                target=process, args=(name, asked.seed, share, seconds, tasks, expected, folder), daemon=True
            )
            for name, share in shares.items()
        }
        for child in children.values():
            child.start()
        watch = Watch(folder, list(children))
        broken = supervise(children, watch, seconds, folder)
    print(watch.table())
    for one in broken:
        print(f"BROKEN: {one}")
    failed = sum(watch.failed.values())
    print(f"seed {asked.seed}: {sum(watch.done.values())} journeys, {failed} wrong, {len(broken)} processes broken")
    return int(bool(failed or broken or not watch.done))


if __name__ == "__main__":
    sys.exit(main())
