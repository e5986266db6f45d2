"""All steps of a tiny model: sections are added and kept, and an interruption anywhere changes nothing."""

import sys
from dataclasses import replace

import pytest
import torch

from semkv.errors import ConfigError, ProfileError
from semkv.profiles.calibration import STEPS, Job, check_steps, run_steps
from semkv.profiles.calibration.steps import forget, with_section
from semkv.profiles.schema import Profile
from tests.conftest import quick_ones

calibration = sys.modules["semkv.profiles.calibration.calibrate"]
SECTIONS = (
    "head_taxonomy",
    "retrieval_heads",
    "layer_errors",
    "sketch",
    "sentences",
    "retrieval_head",
    "memory_model",
    "sekv",
)


@pytest.fixture(scope="module", autouse=True)
def capture_once(captured):
    """The capture of the one model here is not repeated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "captured_program", lambda model: captured)
        yield


@pytest.fixture(scope="module")
def job(model, settings, measure_settings, measure_data, make_data):
    short = settings.model_copy(update={"max_steps": 4, "evaluate_every": 2})
    return Job(model, "tiny", "semkv-profile tiny", make_data(short), short, measure_data, measure_settings)


@pytest.fixture(scope="module")
def finished(job, capture_once):
    return run_steps(job, STEPS)


def same(one: Profile, other: Profile) -> bool:
    """Whether two profiles differ in when and how long they were made alone."""
    assert one.tensors.keys() == other.tensors.keys()
    equal = all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    return equal and all(getattr(one.info, name) == getattr(other.info, name) for name in SECTIONS)


def test_every_section_is_there_and_loads(finished, measure_settings, tmp_path):
    profile = Profile.load(finished.profile.save(tmp_path / "p"))
    assert all(getattr(profile.info, name) is not None for name in SECTIONS)
    assert set(profile.info.measured) == set(STEPS[:-1])
    record = profile.info.measured["taxonomy"]
    assert record.units == 4
    assert record.settings["top_share"] == measure_settings.top_share
    assert record.data == "random tokens"
    assert profile.info.provenance.steps == 4
    assert [row["step"] for row in finished.history] == [0, 2, 4]
    assert finished.skipped == ()


class Stop(Exception):
    pass


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("after", quick_ones([1, 2], [1]))
def test_a_run_killed_in_any_step_ends_with_the_same_profile(job, finished, tmp_path, step, after):
    work = tmp_path / "p.resume"
    phase = "train" if step == "sekv" else step
    seen = []

    def stop(name, done, total, figures):
        if name == phase and done == after:
            raise Stop

    with pytest.raises(Stop):
        run_steps(job, STEPS, work=work, report=stop, save_seconds=0)
    resumed = run_steps(job, STEPS, work=work, report=lambda name, *_: seen.append(name), save_seconds=0)
    assert same(resumed.profile, finished.profile)
    assert resumed.notes == finished.notes
    assert not set(seen) & set(STEPS[: STEPS.index(step)]), "finished steps are not run again"
    assert [row["step"] for row in resumed.history] == [0, 2, 4]
    forget(work)
    assert not work.exists()


def test_an_interrupted_step_goes_on_where_it_stopped(job, tmp_path):
    work, seen = tmp_path / "w", []

    def stop(name, done, total, figures):
        if done == 3:
            raise Stop

    with pytest.raises(Stop):
        run_steps(job, ["taxonomy"], work=work, report=stop, save_seconds=0)
    run_steps(job, ["taxonomy"], work=work, report=lambda name, done, *_: seen.append(done))
    assert seen == [4]


def test_one_step_again_keeps_the_other_sections(job, finished, measure_settings):
    loose = replace(job, measure_settings=measure_settings.model_copy(update={"tau_similar": 0.0}))
    again = run_steps(loose, ["taxonomy"], profile=finished.profile).profile
    assert again.info.head_taxonomy.roles == (("pivot", "satellite"), ("pivot", "satellite"))
    for name in SECTIONS[1:]:
        assert getattr(again.info, name) == getattr(finished.profile.info, name)
    assert again.info.provenance == finished.profile.info.provenance
    assert again.tensors.keys() == finished.profile.tensors.keys()
    assert again.info.measured["sketch"] == finished.profile.info.measured["sketch"]


def test_a_model_that_passes_no_needle_test_keeps_the_rest(job, measure_settings, tmp_path):
    strict = replace(job, measure_settings=measure_settings.model_copy(update={"pass_recall": 0.999}))
    made = run_steps(strict, ["retrieval-heads", "sketch"], work=tmp_path / "w")
    assert made.skipped == ("retrieval-heads",)
    assert "needle tests passed" in made.notes["retrieval-heads"]
    assert made.profile.info.retrieval_heads is None
    assert made.profile.info.sketch is not None
    resumed = run_steps(strict, ["retrieval-heads", "sketch"], work=tmp_path / "w")
    assert resumed.skipped == ("retrieval-heads",)


def test_another_run_is_refused(job, measure_settings, tmp_path):
    work = tmp_path / "w"
    run_steps(job, ["layer-errors"], work=work)
    for other in (["layer-errors", "sketch"], ["taxonomy"]):
        with pytest.raises(
            ConfigError, match=r"was made with other steps, settings, data .* or start again with --restart"
        ):
            run_steps(job, other, work=work)
    changed = replace(job, measure_settings=measure_settings.model_copy(update={"keep": 20}))
    with pytest.raises(ConfigError, match=r"was made with other steps, settings"):
        run_steps(changed, ["layer-errors"], work=work)
    (work / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"is damaged .*: start again with --restart"):
        run_steps(job, ["layer-errors"], work=work)


def test_a_profile_of_another_model_is_refused(job, finished, make_llama):
    other = replace(job, model=make_llama(seed=1))
    with pytest.raises(ProfileError, match=r"belongs to another model"):
        run_steps(other, ["taxonomy"], profile=finished.profile)


def test_steps_are_put_in_order_and_unknown_ones_named():
    assert check_steps(["sekv", "taxonomy", "taxonomy"]) == ("taxonomy", "sekv")
    with pytest.raises(
        ConfigError, match=r"--steps 'speed' is unknown: it can be taxonomy, retrieval-heads, layer-errors"
    ):
        check_steps(["speed"])


def test_a_model_in_training_mode_is_refused(job, make_llama):
    with pytest.raises(ConfigError, match=r"the model is in training mode"):
        run_steps(replace(job, model=make_llama().train()), ["taxonomy"])


def test_replacing_a_section_drops_its_old_tensors(finished):
    bare = with_section(finished.profile, "sketch", None, "sketch.", {})
    assert not any(name.startswith("sketch.") for name in bare.tensors)
    assert bare.info.sekv == finished.profile.info.sekv
