"""Two gloo processes calibrate what one does: equal to the bit, whatever stops them in between."""

from __future__ import annotations

import sys

import pytest
import torch

from semkv.errors import ConfigError, ProcessError
from semkv.io.ranks import Ranks
from semkv.profiles.calibration import STEPS, Job, run_steps
from semkv.profiles.schema import Profile
from tests.processes import in_ranks

calibration = sys.modules["semkv.profiles.calibration.calibrate"]
WHEN = {"created", "wall_minutes"}


@pytest.fixture(scope="module")
def job(model, captured, settings, measure_settings, measure_data, make_data):
    short = settings.model_copy(update={"max_steps": 4, "evaluate_every": 2, "sequences": 3})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "captured_program", lambda model: captured)
        yield Job(model, "tiny", "semkv-profile tiny", make_data(short), short, measure_data, measure_settings)


@pytest.fixture(scope="module")
def alone(job):
    """What one process makes, in one thread as the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run_steps(job, STEPS)
    finally:
        torch.set_num_threads(threads)


def content(profile: Profile) -> dict:
    values = profile.info.model_dump(mode="json")
    for record in (*values["measured"].values(), values["provenance"] or {}):
        for name in WHEN & record.keys():
            del record[name]
    return values


def check_same(made: Profile, other: Profile) -> None:
    assert made.tensors.keys() == other.tensors.keys()
    assert [name for name, x in made.tensors.items() if not torch.equal(x, other.tensors[name])] == []
    assert content(made) == content(other)


def test_two_processes_make_the_profile_of_one(job, alone, tmp_path):
    """Every step, sums and training, on both ranks; the first alone writes."""
    writes = tmp_path / "writes"

    def run(ranks: Ranks):
        seen: list[tuple[str, int]] = []
        work = tmp_path / f"work-{ranks.rank}"  # machines with disks of their own
        made = run_steps(
            job, STEPS, work=work, report=lambda name, done, *_: seen.append((name, done)), save_seconds=0, ranks=ranks
        )
        made.profile.save(writes / str(ranks.rank))
        return made.notes, made.history, seen

    first, second = in_ranks(run)
    assert not isinstance(first, Exception), first.__notes__
    expected = Profile.load(alone.profile.save(writes / "alone"))
    for rank in (0, 1):
        check_same(Profile.load(writes / str(rank)), expected)
    assert first[0] == second[0] == alone.notes
    assert first[1] == alone.history
    assert first[2] == second[2]
    files = {path.name for path in (tmp_path / "work-1").rglob("*") if path.is_file()}
    assert files == {f"context-{number}-{site}.safetensors" for number in (1, 3) for site in (0, 1)}


def test_few_contexts_that_agree_stop_many_processes_too(job, measure_settings):
    """Where one process stops after an odd number of contexts, so do two."""
    loose = measure_settings.model_copy(update={"least": 3, "agreement": -1.0})
    job = Job(job.model, job.name, job.command, None, job.settings, job.measure_data, loose)
    found = run_steps(job, ["taxonomy"]).profile
    assert found.info.measured["taxonomy"].units == 3
    units = in_ranks(lambda ranks: run_steps(job, ["taxonomy"], ranks=ranks).profile.info.measured["taxonomy"].units)
    assert units == [3, 3]


class Stop(ConfigError):
    pass


@pytest.mark.parametrize("step", ["sketch", "retrieval-head", "sekv"])
def test_an_interrupted_run_goes_on_with_any_number_of_processes(job, alone, tmp_path, step):
    steps, work, phase = [step], tmp_path / "work", "train" if step == "sekv" else step

    def stop(name, done, *_):
        if name == phase:
            raise Stop("stopped")

    def begin(ranks: Ranks):
        run_steps(job, steps, work=work, report=stop if ranks.first else None, save_seconds=0, ranks=ranks)

    error, other = in_ranks(begin)
    assert isinstance(error, Stop)
    assert isinstance(other, ProcessError)
    names = [name for name in alone.profile.tensors if name.startswith(step.replace("-", "_"))]
    assert names
    for name in names:
        assert torch.equal(run_steps(job, steps, work=work).profile.tensors[name], alone.profile.tensors[name])


def test_processes_with_other_settings_are_refused(job, measure_settings):
    def run(ranks: Ranks):
        own = measure_settings.model_copy(update={"keep": 16 + ranks.rank})
        other = Job(job.model, job.name, job.command, None, job.settings, job.measure_data, own)
        run_steps(other, ["layer-errors"], ranks=ranks)

    error, told = in_ranks(run)
    assert "process 1 of 2 has another model, data or settings than process 0" in str(error)
    assert isinstance(told, ProcessError)
