"""`semkv plan`: tables, JSON and a picture from a configuration alone."""

from __future__ import annotations

import json

import pytest

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return path


def test_a_plan_with_everything(run, config, tmp_path):
    out, pictures = tmp_path / "out" / "plan.json", tmp_path / "pictures"
    result = run(
        "plan",
        "--model",
        config,
        "--gpu",
        "rtx4090",
        "--context",
        "128K",
        "--budget",
        "0.1",
        "--json",
        out,
        "--report",
        pictures,
    )
    assert result.exit_code == 0, result.output
    for said in ("8.03 B parameters", "KV 128.0 KiB per token", "22.4 GiB at 1,008 GB/s", "with 95% overlap"):
        assert said in result.output
    plan = json.loads(out.read_text())
    full, offload, budget, progressive = plan["ways"]
    assert not full["fits"]
    assert [way["fits"] for way in (offload, budget, progressive)] == [True] * 3
    assert full["read"] - budget["read"] == pytest.approx(0.9 * 131072 * 131072, rel=1e-6)
    assert offload["floor_seconds"] == pytest.approx(131072 * 131072 / 32e9)
    assert budget["tokens_per_second"] == pytest.approx(1 / budget["floor_seconds"])
    assert len(plan["thresholds"]) == 33
    assert f"{budget['longest']:,}" in result.output
    assert (pictures / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_budget_there_are_two_ways(run, config):
    result = run(
        "plan",
        "--model",
        config,
        "--gpu",
        "memory=80GB,bandwidth=2TB/s,link=32GB/s",
        "--context",
        "8K",
        "--budget",
        "full",
    )
    assert result.exit_code == 0, result.output
    assert "full, on the host" in result.output
    assert "semkv" not in result.output
    assert "Alg. 1" not in result.output


def test_options_reach_the_plan(run, config, tmp_path):
    out = tmp_path / "plan.json"
    result = run(
        "plan",
        "--model",
        config,
        "--gpu",
        "h100,link=25GB/s",
        "--context",
        "1024K",
        "--batch",
        4,
        "--budget",
        2048,
        "--waits",
        "raw",
        "--dtype",
        "float16",
        "--weights",
        "5GB",
        "--working-memory",
        "1GB",
        "--host-memory",
        "2TB",
        "--json",
        out,
    )
    assert result.exit_code == 0, result.output
    plan = json.loads(out.read_text())
    asked = {
        "tokens": 1 << 20,
        "rows": 4,
        "budget": 2048,
        "form": "raw",
        "runtime": 10**9,
        "host": 2 * 10**12,
    }
    assert {name: plan["workload"][name] for name in asked} == asked
    assert plan["decoder"]["weights"] == 5 * 10**9
    assert plan["machine"]["link"] == 25 * 10**9
    assert "declares 131,072 positions, fewer than the 1,048,576 planned for" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "abacus"], "gpu 'abacus' is not known"),
        (["--context", "1K,2K"], "a plan takes one --context and one --budget"),
        (["--batch", "0"], "expected at least one token and one row"),
        (["--weights", "heavy"], "--weights: 'heavy' is no size"),
        (["--waits", "zip"], "form 'zip' is not one of int8, raw, none"),
        (["--model", "./nowhere"], "model ./nowhere: no configuration"),
        (["--budget", "7.5"], "a fraction of the full KV must lie in"),
        (["--budget", "5"], "no method can live in fewer than 24 tokens"),
    ],
)
def test_refusals_are_one_line(run, config, options, said):
    result = run("plan", "--model", config, "--gpu", "h100", "--context", "8K", *options)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_deployment(run, config, tmp_path):
    """Llama-3.1-8B: 34 compressed users on 80 GB beside the weights, 114 in a terabyte of a host; three whole ones."""
    out = tmp_path / "plan.json"
    words = ("--budget", "10%", "--users", 1000, "--context", "128K", "--gpus", 64, "--host-memory", "1T")
    result = run("plan", "--model", config, "--gpu", "h100", "--method", "sekv", *words, "--json", out)
    assert result.exit_code == 0, result.output
    for said in ("1,000 users at once", "no, 912", "host memory", "tokens/s, estimate", "one H200", "sekv 15.5"):
        assert said in " ".join(result.output.split())
    plan = json.loads(out.read_text())
    full, budget = plan["deployments"]
    assert (full["capacity"], full["needed_gpus"], full["binds"]) == (3 * 64, 334, "device memory")
    assert (budget["capacity"], budget["needed_gpus"], budget["hosts"]) == (8 * 114, 8 * 8 + 3, 8)
    assert budget["estimated_tokens"] == pytest.approx(912 / budget["step_floor"] / 15.51)
    assert plan["fleet"]["gpus_per_host"] == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--users", 0), "--users 0: expected a number from 1 to"),
        (("--users", 5, "--batch", 2), "--batch 2: rows of a step follow from --users"),
        (("--users", 5, "--method", "none"), "unknown method 'none'; there are:"),
        (("--users", 5, "--method", "full"), "--method full needs --budget full"),
        (("--users", 5, "--method", "sekv", "--budget", "full"), "--method sekv needs a --budget below `full`"),
        (("--users", 5, "--network", "fast"), "--network: 'fast' is no size"),
        (("--gpus", 5), "--gpus is for the plan of a deployment: add --users"),
    ],
)
def test_deployments_that_are_refused(run, config, words, said):
    result = run("plan", "--model", config, "--gpu", "h100", "--context", "8K", *words)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
