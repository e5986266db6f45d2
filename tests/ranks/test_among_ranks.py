"""Two processes on gloo share a model: they give the tokens of one, and hold half of its KV each."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import semkv
from semkv.compiler.pipeline import among_ranks
from semkv.errors import ArtifactError, ConfigError
from semkv.ir.ranks import Ranks, ranks_of

HERE = Path(__file__).parent
SPEC = importlib.util.spec_from_file_location("ranks_worker", HERE / "worker.py")
worker = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(worker)

FAST = [["full", None], ["snapkv", 0.3], ["chunkkv", 0.3], ["sekv", 0.4]]
"""All kept; chosen per head; by the votes of all heads; units and their summaries."""
SLOW = [
    *([name, 0.4] for name in ("streaming_llm", "h2o", "pyramidkv", "cake", "quest", "shadowkv", "semanticache")),
    *([name, 0.6] for name in ("infllm", "clusterkv")),
]


def together(jobs, source: str, folder: Path, size: int = 2):
    """What each of `size` processes gives."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "worker.py"), json.dumps(jobs), source, str(folder)]
    running = [
        subprocess.Popen(command, env={**os.environ, **places, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    for process in running:
        _, problem = process.communicate(timeout=280)
        assert process.returncode == 0, problem[-3000:]
    return [torch.load(folder / str(rank)) for rank in range(size)]


def check(jobs, tmp_path):
    expected = worker.results(jobs, "", None)
    made = together(jobs, "", tmp_path)
    for method, _ in jobs:
        one, both = expected[method], [each[method] for each in made]
        assert "error" not in one, one
        for own in both:
            assert own.get("tokens") == one["tokens"], (method, own.get("error"))
            torch.testing.assert_close(own["logits"], one["logits"], rtol=1e-9, atol=1e-9)
            assert own["held"] <= 0.52 * one["held"], method
        assert torch.equal(both[0]["logits"], both[1]["logits"]), method


def test_two_processes_give_the_tokens_of_one(tmp_path):
    check(FAST, tmp_path)


@pytest.mark.slow
def test_every_method_without_a_profile_gives_the_tokens_of_one_process(tmp_path):
    check(SLOW, tmp_path)


def test_an_artifact_is_loaded_in_parts(tmp_path):
    whole = semkv.compile(worker.model(), method="snapkv", budget=0.3, config=worker.SETTINGS)
    whole.save(tmp_path / "whole.semkv")
    one = worker.run(whole)
    for own in together([], str(tmp_path / "whole.semkv"), tmp_path):
        assert own["loaded"]["tokens"] == one["tokens"]
        torch.testing.assert_close(own["loaded"]["logits"], one["logits"], rtol=1e-9, atol=1e-9)
        assert own["loaded"]["held"] <= 0.52 * one["held"]


def test_what_a_process_has_of_a_model_is_not_saved_as_the_model(tmp_path):
    whole = semkv.compile(worker.model(), config=worker.SETTINGS)
    part = semkv.compiled.CompiledModel(
        among_ranks(whole._source, Ranks(0, 2, "none")), None, whole.method, None, worker.SETTINGS
    )
    with pytest.raises(ArtifactError, match=r"process 0 of 2.*group="):
        part.save(tmp_path / "part.semkv")
    with pytest.raises(ArtifactError, match="cannot be exported"):
        part.export(tmp_path / "part.onnx")
    with pytest.raises(ConfigError, match=r"heterocache.*group="):
        part.with_method("heterocache", 0.5)
    assert "rank 0 of 2" in semkv.explain(part)


def test_a_group_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="init_process_group"):
        ranks_of("world")
