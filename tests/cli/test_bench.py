"""`semkv bench`: what is timed, counted and refused."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import semkv
from semkv.errors import InputError, SemkvError
from semkv.evaluation.bench import Timing, check_tokens, time_compiled
from semkv.profiles.bundled.tokenizer import build_tokenizer

SPECS = "memory=1GB,bandwidth=1GB/s,link=1MB/s"


def test_methods_beside_the_floor(run, tiny_model, tmp_path):
    out = tmp_path / "out" / "bench.json"
    result = run(
        "bench",
        "--model",
        tiny_model,
        "--methods",
        "full,streaming_llm,quest",
        "--budgets",
        "0.5,128",
        "--context",
        256,
        "--batch",
        2,
        "--steps",
        5,
        "--warmup",
        1,
        "--gpu",
        SPECS,
        "--json",
        out,
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["timings"]
    assert [(row["method"], row["budget"]) for row in rows] == [
        ("full", None),
        ("streaming_llm", 0.5),
        ("streaming_llm", 128),
        ("quest", 0.5),
        ("quest", 128),
    ]
    for row in rows:
        assert len(row["step_ms"]) == 5
        assert min(row["step_ms"]) > 0
        assert row["first_ms"] > 0
        assert (
            row["full_bytes"] == 2 * 262 * 2 * 2 * 2 * 8 * 4
        )  # rows, tokens, layers, keys and values, heads, dim, float32
        cap = 1.1 if row["budget"] is None else 0.5
        assert row["nbytes"]["peak"] <= cap * row["full_bytes"]
        moved_ms = 1000 * 2 * row["moved_bytes"] / 1e6
        assert row["floor_ms"] >= moved_ms > 0 if row["method"] == "quest" else row["moved_bytes"] == 0
        assert row["floor_ms"] * 1e6 >= row["nbytes"]["peak"]  # at a gigabyte a second
    assert "first token" in result.output
    assert "quest" in result.output


def test_what_is_kept_beyond_the_budget_is_told(run, tiny_model, tmp_path):
    out = tmp_path / "bench.json"
    arguments = ("--budgets", "0.3", "--context", 128, "--steps", 12, "--warmup", 1, "--json", out)
    result = run("bench", "--model", tiny_model, "--methods", "snapkv,h2o", "--generated", "budgeted,kept", *arguments)
    assert result.exit_code == 0, result.output
    rows = {row["method"]: row for row in json.loads(out.read_text())["timings"]}
    assert list(rows) == ["snapkv", "snapkv, kept", "h2o"]
    assert [rows[name]["excess_share"] > 0 for name in rows] == [False, True, False]
    assert rows["snapkv, kept"]["nbytes"]["excess"] > 0
    assert f"holds {100 * rows['snapkv, kept']['excess_share']:.2f} /" in " ".join(result.output.split())


def test_percentiles_and_throughput():
    timing = Timing("m", None, 8, 2, 1.0, tuple(map(float, range(100, 0, -1))), {}, 1, 0.0, 0.0)
    assert [timing.percentile(p) for p in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert timing.tokens_per_second == pytest.approx(1000 * 2 * 100 / 5050)
    assert Timing("m", None, 8, 1, 1.0, (3.0,), {}, 1, 0.0, 0.0).percentile(50) == 3.0


@pytest.fixture(scope="module")
def pair(tiny_model):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_model).eval()
    return model, semkv.compile(model)


def test_steps_are_greedy_and_counted(pair):
    _, full = pair
    ids = torch.arange(40)[None]
    timing = time_compiled(full, ids, warmup=2, steps=3)
    assert (timing.tokens, timing.rows, len(timing.step_ms)) == (40, 1, 3)
    assert timing.full_bytes == 45 * 2 * 2 * 2 * 8 * 4
    with pytest.raises(InputError, match="0 steps after 2 of warm-up"):
        time_compiled(full, ids, warmup=2, steps=0)
    with pytest.raises(InputError, match="40 tokens and 500 steps do not fit the model's context of 512"):
        time_compiled(full, ids, warmup=0, steps=500)


def test_nothing_is_timed_while_tokens_differ(pair):
    model, full = pair
    ids = torch.arange(64)[None]
    check_tokens(model, full, ids)

    class Other:
        def generate(self, prompt, **options):
            return torch.cat([prompt, torch.zeros(1, 8, dtype=torch.int64)], 1)

    with pytest.raises(SemkvError, match="nothing is timed before they agree"):
        check_tokens(Other(), full, ids)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--methods", "abacus"], "abacus"),
        (["--batch", "0"], "a --batch of at least 1"),
        (["--gpu", "abacus"], "gpu 'abacus' is not known"),
        (["--text", "nowhere.txt"], "--text nowhere.txt: no such file"),
    ],
)
def test_refusals_are_one_line(run, tiny_model, options, said):
    result = run("bench", "--model", tiny_model, "--context", 64, *options)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_folded_tokens_on_disk(run, tiny_model, tmp_path):
    result = run(
        "bench",
        "--model",
        tiny_model,
        "--methods",
        "quest",
        "--budgets",
        "0.4",
        "--context",
        256,
        "--steps",
        3,
        "--warmup",
        1,
        "--host",
        "disk",
        "--disk-folder",
        tmp_path,
        "--json",
        tmp_path / "bench.json",
    )
    assert result.exit_code == 0, result.output
    assert "Folded tokens, per step" in result.output
    (header,) = [line.split() for line in result.output.splitlines() if "p50" in line]
    assert header[-2:] == ["host", "disk"]
    (row,) = json.loads((tmp_path / "bench.json").read_text())["timings"]
    assert row["nbytes"]["disk"] > 0
    assert row["moved_bytes"] > 0


def test_a_text_that_is_too_short(run, tiny_model, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("the old book")
    result = run("bench", "--model", tiny_model, "--context", 64, "--text", text)
    assert result.exit_code == 2
    assert "tokens, fewer than the 64 asked for" in result.output


def test_auto_is_timed_once_as_what_it_stands_for(run, tmp_path):
    out, best = tmp_path / "bench.json", semkv.bundled.profile().best_method(0.2)
    result = run(
        "bench",
        "--methods",
        f"{best},auto",
        "--budgets",
        "0.2",
        "--context",
        256,
        "--steps",
        2,
        "--warmup",
        1,
        "--json",
        out,
    )
    assert result.exit_code == 0, result.output
    assert [(row["method"], row["budget"]) for row in json.loads(out.read_text())["timings"]] == [(best, 0.2)]


def test_auto_without_a_profile_is_refused_before_the_model_is_read(run):
    result = run("bench", "--model", "./not/there", "--methods", "auto")
    assert result.exit_code == 2
    assert "method 'auto' needs a profile whose methods were measured" in result.stderr


@pytest.mark.slow
def test_latents_hold_less(run, tmp_path):
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        max_position_embeddings=256,
    )
    DeepseekV3ForCausalLM(config).save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    full = []
    for more in ((), ("--latents",)):
        out = tmp_path / "bench.json"
        result = run(
            "bench",
            "--model",
            tmp_path / "model",
            "--methods",
            "full,streaming_llm",
            "--budgets",
            "0.5",
            "--context",
            128,
            "--steps",
            2,
            "--warmup",
            1,
            "--json",
            out,
            *more,
        )
        assert result.exit_code == 0, result.output
        full.append(json.loads(out.read_text())["timings"][0]["full_bytes"])
    heads, latents = full
    assert latents < heads / 2
