"""Compute, copies and waits of decode steps as a Chrome trace and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from semkv.evaluation.plots import COLOURS, INK, figure_of, plain, save
from semkv.runtime.timeline import StepTimes, Timeline

THREAD, WAITS = "prefetch thread", "waits"
KINDS = {"compute": COLOURS[0], "choice": COLOURS[5], "copy": COLOURS[2], "wait": COLOURS[1]}
SAID = {
    "compute": "compute: attention, MLP, the next projections",
    "choice": "choice: new tokens, scores, unfolding",
    "copy": "copies ahead of need",
    "wait": "standing still for folded tokens",
}


@dataclass(frozen=True)
class Event:
    """Something that was done: its row, its name, one of `KINDS`, and when, in microseconds of the recording."""

    row: str
    name: str
    kind: str
    begun: float
    took: float


def events(timeline: Timeline) -> list[Event]:
    """A row per layer, one of the thread that fetches ahead, one of waits. What a layer computes is the time from the end of its
    turn to the beginning of the next one's; the embedding counts to the first, the head to the last."""
    spans = [span for step in timeline.steps for span in _of_step(step)]
    start = min((begun for *_, begun, _ in spans), default=0.0)
    return [Event(row, name, kind, 1e6 * (begun - start), 1e6 * (to - begun)) for row, name, kind, begun, to in spans]


def _of_step(step: StepTimes) -> Iterator[tuple[str, str, str, float, float]]:
    if not step.turns:
        return
    first, last = step.turns[0], step.turns[-1]
    yield _layer(first.layer), "embedding and projections", "compute", step.begun, first.begun
    for turn in step.turns:
        yield _layer(turn.layer), "choice", "choice", turn.begun, turn.ended
        for took in turn.took:
            for begun, to in took.stalls:
                yield WAITS, f"for layer {turn.layer}", "wait", begun, to
            if took.fetch is not None:
                yield THREAD, f"{took.fetched} tokens for layer {turn.layer}", "copy", *took.fetch
    for turn, after in pairwise(step.turns):
        yield _layer(turn.layer), "attention and MLP", "compute", turn.ended, after.begun
    yield _layer(last.layer), "attention, MLP and head", "compute", last.ended, step.ended


def _layer(number: int) -> str:
    return f"layer {number}"


def rows_of(found: list[Event]) -> list[str]:
    """Rows from top to bottom: layers in order, the thread, the waits."""
    layers = sorted({event.row for event in found} - {THREAD, WAITS}, key=lambda row: int(row.split()[1]))
    return [*layers, THREAD, WAITS]


def write_trace(found: list[Event], path: Path) -> Path:
    """A Chrome trace, which chrome://tracing and Perfetto show."""
    rows = {row: number for number, row in enumerate(rows_of(found))}
    named = [
        {"ph": "M", "name": name, "pid": 1, "tid": number, "args": args}
        for row, number in rows.items()
        for name, args in (("thread_name", {"name": row}), ("thread_sort_index", {"sort_index": number}))
    ]
    done = [
        {
            "ph": "X",
            "name": event.name,
            "cat": event.kind,
            "pid": 1,
            "tid": rows[event.row],
            "ts": event.begun,
            "dur": event.took,
        }
        for event in found
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": [*named, *done], "displayTimeUnit": "ms"}) + "\n", encoding="utf-8")
    return path


def draw(found: list[Event], title: str, subtitle: str, path: Path) -> Path:
    """The same as a picture (PNG)."""
    rows = rows_of(found)
    figure = figure_of(11.0, 2.0 + 0.3 * len(rows), title, subtitle)
    axes = figure.subplots()
    plain(axes)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#E5E5E5", linewidth=0.8)
    for kind, colour in KINDS.items():
        for place, row in enumerate(rows):
            own = [(e.begun / 1000, e.took / 1000) for e in found if e.kind == kind and e.row == row]
            axes.broken_barh(own, (place - 0.38, 0.76), facecolors=colour, edgecolors="none")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, max((e.begun + e.took for e in found), default=1.0) / 1000)
    axes.set_xlabel("milliseconds", fontsize=8, color=INK)
    handles = [axes.barh([0], [0], color=colour, label=SAID[kind]) for kind, colour in KINDS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return save(figure, path)
