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
    assert profile.tensors["sekv.router.0"].shape == (4, 8, 16)
    assert profile.tensors["sekv.router.0"].dtype == torch.float16
    assert profile.tensors["sekv.threshold.1"].shape == (4,)
    assert profile.info.model.vocab_size == 40
    provenance = profile.info.provenance
    assert provenance.steps == settings.max_steps
    assert provenance.settings["length"] == 192
    assert {"caught", "coarse", "oracle", "key_loss", "value_loss"} == provenance.losses.keys()
    assert [row["site"] for row in provenance.table] == [0, 1]
    assert all(0 <= row["recall"] <= 1 and row["key_rank"] > 0 for row in provenance.table)


def test_another_model_is_told_apart(finished, make_llama):
    with pytest.raises(ProfileError, match=r"belongs to another model"):
        finished.profile.check_model(model_fingerprint(make_llama(seed=1)))


def test_what_is_kept_catches_as_much_as_anything_that_was_tried(finished):
    assert [row["step"] for row in finished.history] == [0, 4, 8, 12]
    assert finished.profile.info.provenance.losses["caught"] >= max(row["caught"] for row in finished.history) - 1e-6


def test_the_model_is_left_as_it_was(model, settings, finished):
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("phase", "after"), [("teacher", 2), ("train", 1)])
def test_an_interrupted_run_goes_on_to_the_same_result(model, settings, finished, tmp_path, make_data, phase, after):
    class Stop(Exception):
        pass

    def stop(name, done, total, figures):
        if (name, done) == (phase, after):
            raise Stop

    with pytest.raises(Stop):
        calibrate(model, make_data(settings), settings, name="tiny", work=tmp_path, progress=stop)
    with pytest.MonkeyPatch.context() as patch:
        if phase == "train":
            patch.setattr(module, "read_context", None)  # what was read is not read again
        resumed = calibrate(model, make_data(settings), settings, name="tiny", work=tmp_path)
    assert resumed.history == finished.history
    for name, tensor in finished.profile.tensors.items():
        assert torch.equal(tensor, resumed.profile.tensors[name]), name


def test_the_work_of_another_run_is_refused(model, settings, tmp_path, make_data):
    short = settings.model_copy(update={"max_steps": 1})
    calibrate(model, make_data(settings), short, name="tiny", work=tmp_path)
    with pytest.raises(ConfigError, match=r"was made with other settings, data or another model.*--restart"):
        calibrate(model, make_data(settings, seed=5), short, name="tiny", work=tmp_path)
    (tmp_path / "minutes.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match=r"is damaged .*: start again with --restart"):
        calibrate(model, make_data(settings), short, name="tiny", work=tmp_path)


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
