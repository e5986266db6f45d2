"""The sweep over architectures on plain decoders and a few families; see benchmarks/quality/architecture_sweep.py."""

from __future__ import annotations

import json
import re

import pytest


@pytest.fixture(scope="module")
def sweep():
    from benchmarks.quality import architecture_sweep

    return architecture_sweep


PLAIN = ("plain: learned absolute positions", "plain: ALiBi", "plain: positions built inside")


@pytest.mark.parametrize("name", [*PLAIN, "llama", "gpt2"])
def test_row_passes(sweep, name):
    row = sweep.examine(name)
    assert row["status"] == "pass", row.get("traceback", row["reason"])
    assert row["tokens_equal"]
    assert row["rows_equal"] == [True, True, True]
    assert row["turns_equal"] == [True, True]
    assert max(row["difference"], row["compressed_difference"]) <= 1e-6
    assert row["compressed_change"] > sweep.CONTROL_DIFFERENCE
    assert row["control_tokens_changed"] or row["control_difference"] > sweep.CONTROL_DIFFERENCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bloom", "gemma2", "mixtral", "deepseek_v3", "gpt_oss", "opt", "phi3", "nemotron_h", "jamba", "minimax"]
)
def test_row_passes_slow(sweep, name):
    row = sweep.examine(name)
    assert row["status"] == "pass", row.get("traceback", row["reason"])


REFUSED = {
    "cpmant": "the graph fixes the length",
    "deepseek_v4": "is not one computation for every length",
    "doge": "export took a branch where `tokens > 32` .*prepare_dynamic_mask",
    "falcon_mamba": "no attention found beside 2 modules with recurrent states",
    "inkling_text": "it depends on token values through aten.gather.default .*rel_logits_proj",
    "mamba": "no attention found beside 2 modules with recurrent states",
    "mamba2": "no attention found beside 2 modules with recurrent states",
    "prophetnet": "is not one computation for every length: export took a branch where `tokens != 511`",
    "qwen4_exp": "indexer .* takes 0 masks",
    "qwen4_exp_text": "indexer .* takes 0 masks",
    "recurrent_gemma": "the graph fixes the length",
    "reformer": "does not run on token ids alone; perhaps it misses num_hashes",
    "rwkv": "the graph fixes the length",
    "xlm": "asserts something of values that follow from the tokens",
    "xlnet": "is not one computation for every length",
}
"""Classes that cannot be captured, and what is said of each."""


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused_with_the_reason(sweep, name):
    row = sweep.examine(name)
    assert row["status"] == "refused", row
    assert re.search(REFUSED[name], row["reason"]), row["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dbrx", "deepseek_v32", "hy_v4", "llama4_text"])
def test_experts_indexers_and_chunks_pass(sweep, name):
    row = sweep.examine(name)
    assert row["status"] == "pass", row.get("traceback", row["reason"])


def test_a_short_convolution_passes(sweep):
    row = sweep.examine("lfm2")
    assert row["status"] == "pass", row.get("traceback", row["reason"])
    assert (row["sites"], row["recurrences"]) == (1, 1)


def test_a_model_that_cannot_be_built_has_no_reference(sweep, monkeypatch):
    def fails(name, dtype):
        raise ValueError("no such size")

    monkeypatch.setattr(sweep, "tiny_model", fails)
    row = sweep.examine("llama")
    assert row["status"] == "no reference"
    assert "no such size" in row["reason"]


def test_a_cache_that_loses_the_text_is_no_reference_and_another_answer_is_no_pass(sweep, monkeypatch):
    own = sweep.Reference.generate

    def losing(self, ids, *, cached=True):
        tokens = own(self, ids, cached=cached)
        if cached and ids.shape[1] == 61:
            tokens = tokens.clone()
            tokens[:, -3:] = 7
        return tokens

    monkeypatch.setattr(sweep.Reference, "generate", losing)
    row = sweep.examine("llama")
    assert row["status"] == "pass"
    assert "rows of 61 tokens are compared with generate(use_cache=False)" in row["reason"]
    monkeypatch.setattr(sweep.Reference, "generate", lambda self, ids, cached=True: losing(self, ids))
    row = sweep.examine("llama")
    assert (row["status"], row["rows_equal"]) == ("fail", [True, True, False])


def test_a_control_that_goes_unnoticed_is_no_pass(sweep, monkeypatch):
    monkeypatch.setattr(sweep, "control", lambda *_: {"control_tokens_changed": False, "control_difference": 0.0})
    row = sweep.examine("llama")
    assert row["status"] == "fail"
    assert "the control with half of the KV is not noticed" in row["reason"]


def test_published_results_hold(sweep):
    """The committed table: at least 170 pass, none fails, and each other row has its reason."""
    rows = json.loads(sweep.RESULTS.read_text())["rows"]
    assert set(rows) >= {*sweep.DECODERS}
    assert sum(row["status"] == "pass" for row in rows.values()) >= 170
    assert not [name for name, row in rows.items() if row["status"] == "fail"]
    refused = {name: row["reason"] for name, row in rows.items() if row["status"] == "refused"}
    assert refused.keys() == REFUSED.keys()
    assert all(re.search(REFUSED[name], reason) for name, reason in refused.items())
    assert all(row["reason"] for row in rows.values() if row["status"] != "pass")
    table = sweep.TABLE.read_text()
    assert all(f"\n| {name} |" in table for name in rows)


def test_prompts_go_beyond_every_constant_and_rows_cross_them(sweep):
    assert sweep.prompt_length({}) == 200
    assert sweep.batch_lengths({}) == [200, 137, 61]
    constants = {"sliding_window": 32, "rope_parameters.original_max_position_embeddings": 64, "conv_kernel": 4}
    assert sweep.batch_lengths(constants) == [200, 137, 20, 52]
    assert sweep.prompt_length({"chunk_size": 150}) == 301
    assert sweep.prompt_length({"window": sweep.CONTEXT}) == 200  # nothing is beyond it


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("llama", {}),
        ("gemma2", {"sliding_window": 32}),
        ("llama4_text", {"attention_chunk_size": 32}),
        ("gpt_oss", {"sliding_window": 32, "rope_parameters.original_max_position_embeddings": 64}),
        ("mamba2", {"conv_kernel": 4, "chunk_size": 32}),
    ],
)
def test_constants_that_count_tokens_are_found_and_small(sweep, name, constants):
    from benchmarks.lib.tiny_models import spans, tiny_config

    assert spans(tiny_config(name)) == constants


def test_a_method_that_drops_another_token_fails(sweep, monkeypatch):
    """The plain memory has to notice that a sink is gone."""
    monkeypatch.setattr("benchmarks.lib.naive_memory.SINKS", 3)
    row = sweep.examine("llama")
    assert row["status"] == "fail"
    assert "logits at half of the KV differ by" in row["reason"]
