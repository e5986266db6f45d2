"""What rows belong to: the model, the profile's content and how memory is stored; not how a program came to be."""

from __future__ import annotations

import pytest

from semkv import bundled
from semkv.config import CompileConfig
from semkv.evaluation.identity import subject_identity


@pytest.fixture(scope="module")
def subject():
    model, _ = bundled.load()
    return model, bundled.profile()


def test_what_computes_the_same_has_the_same_identity(subject):
    model, profile = subject
    other = profile.info.model_copy(update={"choices": (), "measured": {}, "provenance": None})
    kept = type(profile)(other, profile.tensors)
    same = subject_identity(model, profile, CompileConfig())
    assert same == subject_identity(model, kept, CompileConfig(cache=True, method_options={"sinks": 1}))


def test_rows_without_settings_were_measured_without_a_floor(subject):
    model, profile = subject
    assert subject_identity(model, profile, None) == subject_identity(model, profile, CompileConfig(floor=0))


def test_what_computes_another_thing_has_another(subject):
    model, profile = subject
    tensors = dict(profile.tensors)
    tensors["sketch.mean.1"] = tensors["sketch.mean.1"] + 1
    made = {
        subject_identity(model, profile, CompileConfig()),
        subject_identity(model, None, CompileConfig()),
        subject_identity(model, type(profile)(profile.info, tensors), CompileConfig()),
        subject_identity(model, profile, CompileConfig(kv_dtype="float16")),
        subject_identity(model, profile, CompileConfig(latents=True)),
        subject_identity(model, profile, CompileConfig(floor=0)),
    }
    assert len(made) == 6
