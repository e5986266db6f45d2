"""The recipe in small: exact transfer to Llama, the data, and a run that stops and resumes."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import LlamaForCausalLM

from semkv.profiles.bundled.data import SPAN, training_batch, training_sequence
from semkv.profiles.bundled.network import Shape, forward, random_init, structured_init, to_llama
from semkv.profiles.bundled.train import PRESETS, Preset, length_at, rate_at, share_done, train

TINY = Preset(
    shape=Shape(layers=3, hidden=160, mlp=64),
    processes=1,
    tokens=256,
    stages=((64, 2), (128, 2)),
    warmup=1,
    save_every=2,
)


@pytest.mark.parametrize("init", [random_init, structured_init])
def test_transfer_to_llama_is_exact(init):
    shape = Shape()
    params = init(shape, 0)
    ids, _, _, _ = training_batch(random.Random(0), 96, 192)
    positions = torch.arange(96).expand_as(ids) + 1000
    with torch.no_grad():
        ours = forward(params, shape, ids, positions, torch.float32)
        theirs = to_llama(params, shape, torch.float32)(ids, position_ids=positions).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def test_structured_start_retrieves_above_chance():
    ids, positions, targets, weights = training_batch(random.Random(0), 128, 4096)
    with torch.no_grad():
        logits = forward(structured_init(Shape(), 0), Shape(), ids, positions)
    assert (logits.argmax(-1) == targets)[weights == 1].float().mean() > 0.1


def test_sequences_have_the_length_and_rising_positions_within_the_span():
    rng = random.Random(0)
    for length in (128, 777):
        reach = 0
        for _ in range(20):
            ids, positions, weights = training_sequence(rng, length)
            assert len(ids) == len(weights) == length + 1
            assert len(positions) == length
            assert all(b > a for a, b in pairwise(positions))
            assert positions[-1] < SPAN
            reach = max(reach, positions[-1])
        assert reach > 2 * length


def test_schedule_warms_up_anneals_and_listens_to_the_clock():
    preset = replace(PRESETS["cpu"], minutes=10)
    assert share_done(preset, preset.steps // 2, 60) == 0.5
    assert share_done(preset, 1, 480) == 0.8
    assert rate_at(preset, 0, 0) < 0.1 * preset.rate
    assert rate_at(preset, preset.warmup, 0.1) == preset.rate
    assert rate_at(preset, preset.warmup, 1.0) == pytest.approx(0.02 * preset.rate)


def test_lengths_grow_and_shorter_ones_stay_in_the_mix():
    preset = PRESETS["cpu"]
    assert {length_at(preset, 0.0, random.Random(i)) for i in range(50)} == {128}
    assert {length_at(preset, 1.0, random.Random(i)) for i in range(200)} == {256, 512, 1024, 2048, 4096}


def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path):
    whole = train(TINY, tmp_path / "whole")
    train(replace(TINY, stages=((64, 2),), constant=0.99), tmp_path / "broken")
    resumed = train(TINY, tmp_path / "broken", resume=True)
    a, b = (LlamaForCausalLM.from_pretrained(folder).state_dict() for folder in (whole, resumed))
    assert a.keys() == b.keys()
    assert all(torch.allclose(a[name].float(), b[name].float(), atol=2e-3) for name in a)


def test_gpu_preset_runs_on_whatever_is_there(tmp_path):
    preset = replace(
        PRESETS["gpu"], device="cpu", tokens=128, stages=((64, 1),), shape=Shape(layers=6, hidden=320, mlp=64)
    )
    model = LlamaForCausalLM.from_pretrained(train(preset, tmp_path))
    assert model.config.num_hidden_layers == 6


@pytest.mark.slow
def test_two_processes_agree_on_one_run(tmp_path):
    folder = train(replace(TINY, processes=2, stages=((64, 2),)), tmp_path)
    assert (folder / "model.safetensors").exists()
