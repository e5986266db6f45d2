"""The last step of `semkv-profile`: every method at every budget, measured, for `method="auto"` to choose from."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from semkv.cli.common import progress_bar
from semkv.errors import ConfigError
from semkv.io.ranks import ALONE, Ranks

CHOICE = "choice"
TEXT_TASKS, TEXT, TEXT_TOKENS = ("niah_single_2", "niah_multikey_1"), "perplexity", 32
"""What methods are compared on where the model is not the bundled one: RULER's needles in the user's own text, and what of it they recover,
over so many tokens behind each context."""
TEXT_BUDGETS = (0.03, 0.05, 0.1)
"""Where methods are furthest apart."""
TEXT_LENGTH = 2048
"""Tokens of a context at most that methods are compared on where the model is not the bundled one."""
TOGETHER = 6
"""Contexts whose answers run in the same steps: those of the first questions."""
ANSWER_TOKENS = 32
"""Of a needle's answer, which begins with the number where it was found."""
COMPRESSING, ANSWER_STEPS, STEP, PROCESS = 0.15, 55, 0.7, 0.5
"""Usual values: what a method takes to compress a context, over a pass; steps of a question, whose tokens run one by one, and its answer;
what a context takes of a step of `TOGETHER`, over a step of the full cache; and what of the time every further process leaves."""
SHOWN = 6
"""Methods that the picture draws in colour beside those that `method="auto"` takes; the others are grey."""
COLOURS = tuple(
    f"tab:{name}" for name in ("blue", "orange", "green", "red", "purple", "brown", "pink", "olive", "cyan")
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def run_choice(
    model: Any,
    tokenizer: Any,
    profile: Any,
    *,
    bundled: bool,
    data: Sequence[Path],
    length: int,
    command: str,
    rows: Path,
    workers: int | None = None,
    latents: bool = False,
    ranks: Ranks = ALONE,
) -> Any:
    """`profile` with its table of choices; `rows` keeps what is measured, for an interrupted run to go on.

    The bundled model answers its own task families; another model looks for needles in the first of the `data` files, in its chat form
    where the tokenizer has one, and goes on reading passages of it.
    workers: processes that measure contexts side by side; None: see `semkv.evaluation.workers.default_workers`. latents: see
    `CompileConfig`. ranks: processes that share the contexts.
    """
    from semkv.api import compile as compile_model
    from semkv.config import CompileConfig
    from semkv.evaluation.choice import choose
    from semkv.evaluation.identity import subject_identity
    from semkv.evaluation.tasks import build_tasks
    from semkv.profiles.calibration.calibrate import versions
    from semkv.profiles.schema import Measured

    started = time.monotonic()
    contest = contest_of(bundled, length)
    if bundled:
        tasks, described = {}, "the bundled model's task families"
    else:
        text = next((path for path in data if path.suffix != ".jsonl"), None)
        if text is None:
            raise ConfigError(
                "--steps choice hides needles in running text: pass --data with a plain text file, or leave `choice` out"
            )
        tasks = build_tasks(
            (*contest.families, *contest.text),
            sources={"haystack": str(text), "text": str(text)},
            options={TEXT: {"tokens": TEXT_TOKENS}}
            | {name: {"new_tokens": ANSWER_TOKENS} for name in contest.families},
            chat=bool(getattr(tokenizer, "chat_template", None)),
        )
        described = f"needles in {text.name}, and passages of it"
    # Half precision is what the KV is kept in where models are served; in float32 every summary would look cheaper.
    wide = next(model.parameters()).dtype.itemsize > 2
    settings = CompileConfig(kv_dtype="float16" if wide else None, floor=0, latents=latents)
    compiled = compile_model(model, profile, method="full", config=settings)
    identity = subject_identity(model, profile, settings, compiled.dtype)
    workers = choice_workers(model, compiled.device, workers, ranks)
    with progress_bar(CHOICE) if ranks.first else nullcontext() as progress:
        made = choose(
            compiled,
            tokenizer,
            contest,
            identity=identity,
            rows=rows,
            progress=progress,
            tasks=tasks,
            workers=workers,
            together=TOGETHER,
            ranks=ranks,
        )
    if not made.choices:
        raise ConfigError(f"no method could run at any budget with contexts of {length} tokens: {made.left_out[0]}")
    plain = dataclasses.asdict(contest)
    record = Measured(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        data=described,
        data_digest=hashlib.sha256(repr(sorted(plain.items())).encode()).hexdigest(),
        units=len(made.choices),
        wall_minutes=round((time.monotonic() - started) / 60, 3),
        versions=versions(),
        settings={name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()},
        note="; ".join(made.left_out)[:8000],
    )
    info = profile.info.model_copy(
        update={"choices": made.choices, "measured": {**profile.info.measured, CHOICE: record}}
    )
    return dataclasses.replace(profile, info=info)


def choice_workers(model: Any, device: Any, asked: int | None, ranks: Ranks) -> int:
    """Processes that a process starts to measure contexts: as asked for, one where several share them already."""
    from semkv.evaluation.workers import default_workers

    if asked is not None:
        return asked
    return 1 if ranks.count > 1 else default_workers(model, device)


def contest_of(bundled: bool, length: int) -> Any:
    """What methods are compared on: contexts of `length` tokens, of another model than the bundled one `TEXT_LENGTH` at most, and fewer
    questions, as its steps are longer."""
    from semkv.evaluation.choice import Contest
    from semkv.methods import METHODS

    methods = tuple(name for name, method in METHODS.items() if method.compresses and not method.needs_indexer)
    if bundled:
        return Contest(methods, length=length)
    return Contest(
        methods,
        budgets=TEXT_BUDGETS,
        families=TEXT_TASKS,
        text=(TEXT,),
        length=min(length, TEXT_LENGTH),
        first=2,
        samples=8,
        questions_per_context=1,
    )


def choice_seconds(passes: Any, *, bundled: bool, length: int, workers: int = 1) -> float:
    """About how long the comparison takes, from the times of `semkv.profiles.calibration.estimate.Passes`; workers: see `run_choice`."""
    from semkv.evaluation.choice import FINALISTS

    contest = contest_of(bundled, length)
    entrants, asked, seconds = len(contest.methods) * len(contest.budgets), contest.first, 0.0
    done = 0
    while True:
        contexts = len(contest.families) * -(-(asked - done) // contest.questions_per_context)
        contexts += len(contest.text) * (asked - done)
        questions = len(contest.families) * (asked - done)
        questions += len(contest.text) * (asked - done) * TEXT_TOKENS / ANSWER_STEPS
        seconds += contexts * (
            2 * passes.seconds(contest.length) + entrants * COMPRESSING * passes.seconds(contest.length)
        )
        seconds += questions * entrants * ANSWER_STEPS * STEP * passes.decode
        if asked >= contest.samples:
            return seconds * PROCESS ** (workers - 1)
        done, asked = asked, min(contest.samples, 2 * asked)
        entrants = len(contest.budgets) * max(FINALISTS, -(-entrants // (3 * len(contest.budgets))))


def choice_table(console: Console, profile: Any) -> None:
    """Scores of methods by budget, the best of each first."""
    from semkv.cli.tables import simple_table

    budgets = sorted({cell.budget for cell in profile.info.choices})
    table = simple_table(
        "accuracy (%) by budget; in brackets, questions per family", "method", *(f"{100 * b:g} %" for b in budgets)
    )
    cells = {(cell.method, cell.budget): cell for cell in profile.info.choices}
    names = _ranked({key: cell.score for key, cell in cells.items()})
    for name in names:
        shown = []
        for budget in budgets:
            cell = cells.get((name, budget))
            best = cell is not None and profile.best_method(budget) == name
            text = "-" if cell is None else f"{100 * cell.score:.0f} ({cell.samples})"
            shown.append(f"{text} *" if best else text)
        table.add_row(name, *shown)
    console.print(table)
    console.print(
        "*: what method='auto' takes at this budget; -: below the method's smallest, or the profile lacks its part",
        highlight=False,
    )


def _ranked(scores: dict[tuple[str, float], float]) -> list[str]:
    """Methods by their scores at all budgets, the best first; what could not run at a budget counts as nothing there."""
    sums: dict[str, float] = {}
    for (name, _), score in scores.items():
        sums[name] = sums.get(name, 0.0) + score
    return sorted(sums, key=lambda name: -sums[name])


def choice_picture(pyplot: Any, section: Any, profile: Any) -> Any:
    """Accuracy of every method against the budget: the best in colour, named where their lines end, what auto takes as stars.

    Those in colour stand a little beside each other, as several may have the same score.
    """
    budgets = sorted({cell.budget for cell in section})
    cells: dict[tuple[str, float], list[float]] = {}
    for cell in section:
        cells.setdefault((cell.method, cell.budget), []).append(100 * cell.score)
    scores = {key: fmean(found) for key, found in cells.items()}
    taken = [profile.best_method(budget) for budget in budgets]
    names = _ranked(scores)
    coloured = [name for place, name in enumerate(names) if place < SHOWN or name in taken]
    figure, axis = pyplot.subplots(figsize=(8, max(4.5, 1.5 + 0.19 * len(names))), layout="constrained")
    ends: list[tuple[float, str, float, dict[str, Any]]] = []
    aside = dict.fromkeys(names, 0.0)
    for place, name in enumerate(names):
        style = {"color": "darkgrey", "lw": 0.9, "ms": 4, "zorder": 2}
        if name in coloured:
            rank = coloured.index(name)
            aside[name] = 0.06 * (rank - (len(coloured) - 1) / 2)
            style = {"color": COLOURS[rank % len(COLOURS)], "lw": 1.8, "ms": 7, "zorder": 3 + len(coloured) - rank}
        points = [(x + aside[name], scores[name, b]) for x, b in enumerate(budgets) if (name, b) in scores]
        axis.plot(*zip(*points), marker=MARKERS[place % len(MARKERS)], **style)
        ends.append((points[-1][1], name, points[-1][0], style))
    ends.sort(key=lambda end: (-end[0], names.index(end[1])))
    for (score, name, x, style), height in zip(ends, _apart([end[0] for end in ends])):
        loud = name in coloured
        axis.annotate(
            name,
            (x, score),
            xytext=(1.06, height),
            textcoords=axis.get_yaxis_transform(),
            va="center",
            fontsize=8,
            color=style["color"] if loud else "dimgrey",
            weight="bold" if loud else "normal",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": style["color"], "lw": 0.6, "relpos": (0, 0.5)},
        )
    stars = [(x + aside[name], scores[name, budget]) for x, (name, budget) in enumerate(zip(taken, budgets))]
    axis.plot(
        *zip(*stars),
        ls="",
        marker="*",
        ms=12,
        color="gold",
        mec="black",
        mew=0.8,
        zorder=20,
        label="what method='auto' takes",
    )
    ticks = [f"{100 * budget:g} %\n{name}" for budget, name in zip(budgets, taken)]
    axis.set_xticks(range(len(budgets)), ticks)
    axis.set(xlim=(-0.35, len(budgets) - 0.65), ylim=(-3, 103), xlabel="budget, of the full KV", ylabel="accuracy (%)")
    asked = sorted({cell.samples for cell in section})
    lengths = ", ".join(f"{length:,}" for length in sorted({cell.length for cell in section}))
    questions = " to ".join(str(count) for count in dict.fromkeys((asked[0], asked[-1])))
    axis.set_title(f"contexts of {lengths} tokens, {questions} questions per family", fontsize=10)
    axis.grid(axis="y", color="gainsboro", lw=0.6)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False)
    return figure


def _apart(wanted: Sequence[float]) -> list[float]:
    """Heights of labels, from 100 down to 0, near those `wanted` (which fall) and far enough from each other."""
    step = min(5.0, 100 / max(1, len(wanted) - 1))
    heights = list(wanted)
    for i in range(1, len(heights)):
        heights[i] = min(heights[i], heights[i - 1] - step)
    for i in reversed(range(len(heights))):
        heights[i] = max(heights[i], step * (len(heights) - 1 - i))
    return heights
