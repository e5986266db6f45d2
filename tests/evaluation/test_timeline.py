"""A recorded step as events, as a Chrome trace and as a picture."""

from __future__ import annotations

import json

import pytest
from matplotlib.image import imread

from semkv.evaluation.timeline import KINDS, draw, events, rows_of, write_trace
from semkv.runtime.supply import Supplied
from semkv.runtime.timeline import StepTimes, Timeline, Turn


@pytest.fixture
def timeline() -> Timeline:
    """A step of two layers, begun at 10 s: the second one's fetch ran before the step, and it waited and fetched itself."""
    waited = Supplied(fetched=5, hits=4, missed=1, stalls=[(10.05, 10.06), (10.06, 10.07)], fetch=(9.99, 10.06))
    made = Timeline()
    made.steps.append(
        StepTimes(10.0, 10.1, [Turn(0, 10.01, 10.02, (Supplied(),)), Turn(3, 10.04, 10.08, (Supplied(), waited))])
    )
    return made


def test_every_moment_of_a_step_is_a_layers(timeline):
    found = events(timeline)
    assert rows_of(found) == ["layer 0", "layer 3", "prefetch thread", "waits"]
    shown = [(e.row, e.kind, round(e.begun / 1000), round(e.took / 1000)) for e in found]
    assert sorted(shown, key=lambda event: event[2]) == [
        ("prefetch thread", "copy", 0, 70),
        ("layer 0", "compute", 10, 10),
        ("layer 0", "choice", 20, 10),
        ("layer 0", "compute", 30, 20),
        ("layer 3", "choice", 50, 40),
        ("waits", "wait", 60, 10),
        ("waits", "wait", 70, 10),
        ("layer 3", "compute", 90, 20),
    ]
    assert {e.kind for e in found} == set(KINDS)
    own = [e for e in found if e.row.startswith("layer")]
    assert sum(e.took for e in own) == pytest.approx(1e5)


def test_the_trace_names_its_rows(timeline, tmp_path):
    trace = json.loads(write_trace(events(timeline), tmp_path / "new" / "steps.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in trace if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == {0: "layer 0", 1: "layer 3", 2: "prefetch thread", 3: "waits"}
    done = [e for e in trace if e["ph"] == "X"]
    assert len(done) == 8
    assert all(e["ts"] >= 0 and e["dur"] > 0 and e["tid"] in names for e in done)


def test_the_picture_shows_each_kind(timeline, tmp_path):
    picture = imread(draw(events(timeline), "title", "subtitle", tmp_path / "steps.png"))
    colours = {tuple(round(255 * x) for x in pixel[:3]) for row in picture[::3] for pixel in row[::3]}
    wanted = [tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)) for colour in KINDS.values()]
    assert [colour for colour in wanted if colour not in colours] == []


def test_a_timeline_without_steps_is_empty():
    assert events(Timeline()) == []
