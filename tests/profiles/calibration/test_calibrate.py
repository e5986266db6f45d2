"""Whole calibrations of a tiny model: the losses fall, interruptions change nothing, misuse is refused before work."""

import sys
from dataclasses import replace

import pytest
import torch

from semkv.artifact.fingerprint import model_fingerprint
from semkv.errors import ConfigError, ProfileError
from semkv.profiles.calibration import calibrate
from semkv.profiles.calibration import train as module
from semkv.profiles.calibration.calibrate import check
from semkv.profiles.schema import Profile

calibration = sys.modules["semkv.profiles.calibration.calibrate"]  # the package exports a function of that name


@pytest.fixture(scope="module", autouse=True)
def capture_once(captured):
    """Calibrations here are of one model: its capture, which has tests of its own, is not repeated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "captured_program", lambda model: captured)
        yield


@pytest.fixture(scope="module")
def finished(model, settings, capture_once, make_data):
    return calibrate(model, make_data(settings), settings, name="tiny", command="semkv-profile tiny")


def test_the_profile_is_whole_and_loads(finished, model, settings, tmp_path):
    profile = Profile.load(finished.profile.save(tmp_path / "tiny.profile"))
    profile.check_model(model_fingerprint(model))
    assert profile.tensors["sekv.router.0"].shape == (4, 16, 16)
    assert profile.tensors["sekv.threshold.1"].shape == (4,)
    assert profile.info.model.vocab_size == 40
    provenance = profile.info.provenance
    assert provenance.steps == settings.max_steps
    assert provenance.settings["length"] == 192
    assert {"distill", "zoom", "rank", "recon", "budget", "total"} <= provenance.losses.keys()
    assert [row["site"] for row in provenance.table] == [0, 1]
    assert all(0 <= row["recall"] <= 1 and row["key_rank"] > 0 for row in provenance.table)


def test_another_model_is_told_apart(finished, make_llama):
    with pytest.raises(ProfileError, match=r"belongs to another model"):
        finished.profile.check_model(model_fingerprint(make_llama(seed=1)))


def test_the_held_out_loss_falls(finished):
    totals = [row["total"] for row in finished.history]
    assert len(totals) == 4
    assert min(totals[1:]) < totals[0]


def test_the_model_is_left_as_it_was(model, settings, finished):
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_interrupted_run_resumes_to_the_same_result(model, settings, finished, tmp_path, monkeypatch, make_data):
    checkpoint = tmp_path / "run.safetensors"

    class Stop(Exception):
        pass

    def stop_after_six(phase, done, total, figures):
        if phase == "train" and done == 6:
            raise Stop

    with pytest.raises(Stop):
        calibrate(model, make_data(settings), settings, name="tiny", checkpoint=checkpoint, progress=stop_after_six)
    seen = []
    resumed = calibrate(
        model,
        make_data(settings),
        settings,
        name="tiny",
        checkpoint=checkpoint,
        progress=lambda phase, done, *_: seen.append(done) if phase == "train" else None,
    )
    assert seen[0] == 5
    assert resumed.history == finished.history
    for name, tensor in finished.profile.tensors.items():
        assert torch.equal(tensor, resumed.profile.tensors[name]), name


def test_a_checkpoint_of_another_run_is_refused(model, settings, tmp_path, make_data):
    checkpoint = tmp_path / "run.safetensors"
    short = settings.model_copy(update={"max_steps": 1})
    calibrate(model, make_data(settings), short, name="tiny", checkpoint=checkpoint)
    with pytest.raises(ConfigError, match=r"was made with other settings, data or another model.*--restart"):
        calibrate(model, make_data(settings, seed=5), short, name="tiny", checkpoint=checkpoint)
    checkpoint.write_bytes(b"broken")
    with pytest.raises(ConfigError, match=r"is damaged .*: start again with --restart"):
        calibrate(model, make_data(settings), short, name="tiny", checkpoint=checkpoint)


def test_training_stops_when_the_held_out_loss_no_longer_falls(model, settings, monkeypatch, make_data):
    worse = iter(range(100))
    monkeypatch.setattr(module.Trainer, "evaluate", lambda self: ({"total": float(next(worse))}, []))
    eager = settings.model_copy(update={"evaluate_every": 1, "patience": 2})
    made = calibrate(model, make_data(settings), eager, name="tiny")
    # Counted from the middle of the run, when the budget loss has its full weight.
    assert made.profile.info.provenance.steps == 7
    assert made.profile.info.provenance.stopped_early


def test_a_model_in_training_mode_is_refused(settings, make_data, make_llama):
    with pytest.raises(ConfigError, match=r"the model is in training mode.*call model\.eval\(\) first"):
        calibrate(make_llama().train(), make_data(settings), settings, name="tiny")


def test_a_context_beyond_the_models_is_refused(program, settings, data):
    small = program.evolve(max_positions=150)
    with pytest.raises(ConfigError, match=r"length 192 with 8 queries needs 200 positions, the model has 150"):
        check(small, data, settings)


def test_tokens_of_another_vocabulary_are_refused(program, settings, data):
    small = program.evolve(vocab_size=20)
    with pytest.raises(ConfigError, match=r"token id \d+, the model's vocabulary has 20 entries: use the model's own"):
        check(small, data, settings)


def test_a_model_without_full_attention_is_refused(program, settings, data):
    sites = tuple(replace(site, window=16, treatment="window") for site in program.sites)
    with pytest.raises(ConfigError, match=r"every attention of this model has a sliding window: there is no memory"):
        check(program.evolve(sites=sites), data, settings)
