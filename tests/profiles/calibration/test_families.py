"""The measured steps on decoders of other kinds: windows, soft-caps, one KV head, ALiBi, sinks."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, Gemma2Config, GptOssConfig, LlamaConfig

from semkv.profiles.calibration import Job, run_steps
from semkv.profiles.calibration.measure import Subject, Sums
from semkv.profiles.calibration.steps import MEASURES

CONFIGS = {
    "windows and soft-caps": Gemma2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        sliding_window=32,
    ),
    "one KV head": LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,
    ),
    "ALiBi": BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4),
    "sinks": GptOssConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["full_attention", "full_attention"],
    ),
}


SLOW = {"sinks", "windows and soft-caps"}
"""Whose capture takes long."""


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in CONFIGS])
def test_every_measured_step_runs(kind, measure_data, measure_settings):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()
    job = Job(model, kind, "semkv-profile", None, None, measure_data, measure_settings)
    made = run_steps(job, list(MEASURES))
    info = made.profile.info
    assert info.head_taxonomy is not None
    assert info.layer_errors is not None
    assert info.sketch is not None
    assert (info.retrieval_heads is None) == ("retrieval-heads" in made.skipped)
    assert all(0 <= value <= 1 for row in info.head_taxonomy.stability for value in row)
    assert "at the attention itself" not in made.notes["layer-errors"]
    if kind == "windows and soft-caps":
        counted = [site.index for site in info.model.sites if site.treatment == "method"]
        assert len(counted) == 1
        assert info.layer_errors.errors[counted[0]] == 1
        assert [len(row) for row in info.sketch.caught] == [2 * (site in counted) for site in range(2)]
    if kind == "one KV head":
        assert info.head_taxonomy.similarity == ((0.0,), (0.0,))
        assert {role for row in info.head_taxonomy.roles for role in row} <= {"anchor", "volatile"}


@pytest.mark.slow
def test_half_precision_is_summed_in_double(model, measure_data, measure_settings):
    """A bf16 model is measured like the float32 one, up to its own rounding."""
    from semkv.profiles.calibration.calibrate import annotated_program

    half = AutoModelForCausalLM.from_config(model.config).eval()
    half.load_state_dict(model.state_dict())
    program = annotated_program(half.to(torch.bfloat16))
    step = MEASURES["sketch"](Subject(program, measure_data, measure_settings))
    sums = Sums()
    step.measure(0, sums)
    assert sums["queries.0"].dtype == torch.float64
    assert torch.isfinite(sums["keys.1"]).all()


def test_one_data_set_suffices(subject):
    alone = replace(subject, data=replace(subject.data, sets=subject.data.sets[:1]))
    for make in MEASURES.values():
        step, sums = make(alone), Sums()
        for unit in range(step.units):
            step.measure(unit, sums)
        assert step.finish(sums) is not None
