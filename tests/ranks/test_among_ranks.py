"""Two processes on gloo share a model: they give the tokens of one, and hold half of its KV each."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import semkv
from semkv.artifact.fingerprint import model_fingerprint
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


def check(jobs, tmp_path, source: str = "", even: bool = True):
    """That processes give what one gives; even: each holds half of its KV. By job, what one and they gave."""
    expected = worker.results(jobs, source, None)
    made = together(jobs, source, tmp_path)
    found = {}
    for job in jobs:
        name = worker.label(job)
        one, both = found[name] = expected[name], [each[name] for each in made]
        assert "error" not in one, (name, one)
        for own in both:
            assert own.get("tokens") == one["tokens"], (name, own.get("error"))
            torch.testing.assert_close(own["logits"], one["logits"], rtol=1e-9, atol=1e-9)
            assert not even or own["held"] <= 0.52 * one["held"], name
            assert all(type(x) is int for x in own["counted"]), (name, own["counted"])  # of bytes there are no parts
        held = sum(own["held"] for own in both)
        assert one["held"] <= held <= 1.05 * one["held"], name  # what all heads have in common, both have
        assert torch.equal(both[0]["logits"], both[1]["logits"]), name
    return found


def test_two_processes_give_the_tokens_of_one(tmp_path):
    check(FAST, tmp_path)


EVEN = (
    (
        ("pivot", "anchor", "satellite", "volatile"),
        ("satellite", "pivot", "anchor", "anchor"),
    ),
    ((0, 1, 0, 3), (1, 1, 2, 3)),
)
"""Roles and clusters of two layers' heads, of which two processes have as many each; a pivot's satellite is elsewhere, and beside it."""
UNEVEN = (
    (
        ("anchor", "satellite", "volatile", "pivot"),
        ("satellite", "satellite", "anchor", "pivot"),
    ),
    ((0, 3, 2, 3), (3, 3, 2, 3)),
)
"""All whole heads in one process, all satellites in the other."""

PILED = (
    (
        ("anchor", "satellite", "volatile", "pivot"),
        ("satellite", "anchor", "volatile", "pivot"),
    ),
    ((0, 3, 2, 3), (3, 1, 2, 3)),
)
"""Whole heads side by side in both layers."""


@pytest.fixture
def whole(tiny, tiny_llama, tmp_path):
    """`whole(roles, clusters, ...) -> path`: the tiny model in float64 as an artifact of a method, its profile with these roles; heads 0
    and 2, then 1 and 2 retrieve."""

    def save(roles, clusters, method="full", budget=None, **options):
        model = copy.deepcopy(tiny_llama).double()
        info = tiny.profile.info
        semantic = ((0.3, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0), (0.0, 0.0, 0.2, 0.0, 0.3, 0.0, 0.0, 0.0))
        changed = {
            "fingerprint": model_fingerprint(model),
            "head_taxonomy": info.head_taxonomy.model_copy(
                update={
                    "roles": roles,
                    "clusters": clusters,
                    "stability": ((0.3, 0.8, 0.4, 0.2), (0.5, 0.3, 0.9, 0.6)),
                }
            ),
            "retrieval_heads": info.retrieval_heads.model_copy(update={"semantic": semantic}),
        }
        profile = replace(tiny.profile, info=info.model_copy(update=changed))
        path = tmp_path / "whole.semkv"
        settings = worker.SETTINGS.model_copy(update={"method_options": options})
        semkv.compile(model, profile, method=method, budget=budget, config=settings).save(path)
        return str(path)

    return save


def test_heads_that_divide_a_budget_or_follow_another_do_as_in_one_process(whole, tmp_path):
    jobs = [["sketch", 0.15, {"exact_form": "int4"}], ["heterocache", 0.8, {"every": 2, "tau_drift": 0.99}]]
    jobs.append(["mixed", 0.6, {"whole": True, "prior": 0.3, "sentence": 0.2}])
    found = check(jobs, tmp_path, whole(*UNEVEN), even=False)
    one, both = found[worker.label(jobs[1])]
    assert one["updates"] > 0  # a pivot's choice went to satellites of the other process
    assert [own["updates"] for own in both] == [0, one["updates"]]
    one, both = found[worker.label(jobs[2])]
    assert [2 * own["keys"] for own in both] == [one["keys"]] * 2


@pytest.mark.parametrize(
    ("method", "budget", "options"),
    [
        ("heterocache", 0.8, {"every": 2}),
        pytest.param("mixed", 0.6, {"whole": True}, marks=pytest.mark.slow),
    ],
)
def test_heads_that_divide_a_budget_are_dealt_so_that_processes_hold_as_much(method, budget, options, whole, tmp_path):
    path = whole(*PILED, method, budget, **options)
    one = worker.run(semkv.load(path))
    both = together([], path, tmp_path)
    for own in both:
        assert own["loaded"]["tokens"] == one["tokens"]
        torch.testing.assert_close(own["loaded"]["logits"], one["logits"], rtol=1e-9, atol=1e-9)
        assert own["loaded"]["peak"] <= 0.52 * one["peak"]


@pytest.mark.slow
def test_every_method_with_a_profile_gives_the_tokens_of_one_process(whole, tmp_path):
    jobs = [
        ["sketch", 0.15],
        ["compresskv", 0.3],
        ["compresskv", 0.4, {"recoverable": True}],
        ["sentencekv", 0.4],
        ["specontext", 0.4],
        ["specontext", 0.4, {"selection": "batch", "strict": True}],
    ]
    path = whole(*EVEN)
    check(jobs, tmp_path, path)
    jobs = [["mixed", 0.3], ["mixed", 0.3, {"prior": 0.3}], ["heterocache", 0.5, {"strict": True, "every": 2}]]
    check(jobs, tmp_path, path, even=False)


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
    assert "rank 0 of 2" in semkv.explain(part)


def test_a_method_that_does_not_share_heads_is_refused():
    whole = semkv.compile(worker.model(), config=worker.SETTINGS)

    class Own(type(whole.method)):
        shares_heads = False

    part = among_ranks(whole._source, Ranks(0, 2, "none"))
    with pytest.raises(ConfigError, match=r"does not run on processes.*group="):
        semkv.compiled.CompiledModel(part, None, Own(), None, worker.SETTINGS)


def test_what_is_on_the_host_has_a_group_of_its_own_beside_one_for_devices():
    """As beside NCCL's, which has no way for it."""
    lines = (
        "import torch, torch.distributed as dist",
        "from semkv.ir.ranks import ranks_of",
        "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)",
        "of_devices = ranks_of(dist.new_group([0], backend='cuda:gloo'))",
        "assert of_devices.host not in ('', of_devices.group)",
        "assert of_devices.reduce(torch.full((2,), 3.0), 'sum').tolist() == [3.0, 3.0]",
        "assert ranks_of(dist.group.WORLD).host == ''",
    )
    made = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-3000:]


def test_a_group_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="init_process_group"):
        ranks_of("world")


def test_processes_that_share_a_head_have_all_of_its_budget_and_count_all_that_it_takes():
    whole = semkv.compile(worker.model(), config=worker.SETTINGS)
    for rank in range(4):  # of two KV heads
        (site, *_) = among_ranks(whole._source, Ranks(rank, 4, "none")).sites
        assert (site.kv_heads, site.among.sharers, site.once) == (1, 2, 1 / 2)
        assert site.whole.kv_heads == 2
