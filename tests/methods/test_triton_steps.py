"""Whole steps with Triton's kernels, in its interpreter, give the logits of PyTorch's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import quick_ones
from tests.methods.test_step_graphs import CASES

pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')

LAUNCHES = {
    "full": 3,
    "streaming_llm": 3,
    "snapkv": 3,
    "pyramidkv": 3,
    "chunkkv": 3,
    "cake": 3,
    "compresskv": 3,
    "compresskv, recoverable": 7,
    "quest, small": 8,
    "shadowkv": 8,
    "clusterkv": 8,
    "sekv": 7,
    "specontext": 6,
    "sketch, raw": 10,
    "sentencekv": 10,
    "semanticache": 12,
    "infllm": 13,
    "sketch": 13,
    "sekv, pooled": 14,
    "omnikv": 16,
    "mixed": 17,
    "h2o": 21,
    "sekv, thresholds": 35,
    "mixed, all": 35,
    "omnikv, strict": 51,
}
"""Of the turn of a layer, at most: of one part, where a layer has several."""
EIGHT = 8
"""Launches of each part of a layer of `heterocache`."""
QUICK = ("sketch",)
LAYERS = 2
APART = 3e-4
"""Of logits: a key that lies between two halves is rounded to another one, where what is read differs by its own rounding."""
ROUNDING = 2e-6
"""Of logits of size 1; KV in half precision is read alike, and computed with in single."""


@pytest.fixture(scope="module")
def artifact(tiny, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("artifact") / "tiny"
    tiny.save(path)
    return path


def steps(
    artifact: Path, method: str, budget: float | None, options: dict, count: int, kv_dtype: str = "float32"
) -> dict:
    return interpreted(
        "steps_in_triton.py",
        str(artifact),
        method,
        json.dumps(budget),
        json.dumps(options),
        str(count),
        kv_dtype,
    )


def interpreted(script: str, *arguments: str) -> dict:
    """What a script of this folder prints where Triton's kernels run in its interpreter."""
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).parent / script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "budget", "options", "kv_dtype", "routed"),
    [
        ("full", None, {}, "float32", set()),
        ("snapkv", 0.4, {}, "float32", set()),
        ("sekv", 0.5, {"router": "trained"}, "float32", {"gate", "selection"}),
        ("sekv", 0.5, {"router": "trained", "forms": "factored"}, "float16", {"gate", "selection"}),
        ("sketch", 0.5, {}, "float32", {"sketch", "selection"}),
        ("mixed", 0.6, {}, "float16", {"sketch", "selection"}),
    ],
)
def test_steps_of_every_kind_of_method_are_those_of_pytorch(artifact, method, budget, options, kv_dtype, routed):
    found = steps(artifact, method, budget, options, 3, kv_dtype)
    assert found["calls"].pop("attention") == LAYERS * 3
    assert set(found["calls"]) >= routed
    assert 0 < found["difference"] <= ROUNDING * max(1, found["size"])


@pytest.mark.parametrize("case", quick_ones([*LAUNCHES, "heterocache"], QUICK))
def test_a_graph_of_triton_s_kernels_answers_like_one_of_pytorch_s(case):
    """Over three steps, or one in the quick run; and the turn of a layer launches no more than it says here."""
    count = "1" if case in QUICK else "3"
    found = interpreted("graphs_in_triton.py", count, "float32", json.dumps({case: CASES[case]}))[case]
    assert found["same"]
    assert 0 < found["difference"] < APART * found["size"]
    parts = found["launches"].count("append_tokens")
    assert len(found["launches"]) == parts * LAUNCHES.get(case, EIGHT)
    assert (parts > 1) == (case == "heterocache")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["quest, small", "sekv", "sketch"])
def test_graphs_in_half_precision(case):
    """Queries are converted to float32 where they are read; what is multiplied with a codebook is converted before."""
    found = interpreted("graphs_in_triton.py", "3", "bfloat16", json.dumps({case: CASES[case]}))[case]
    assert found["same"]
    assert 0 < found["difference"] < 2 * torch.finfo(torch.bfloat16).eps * found["size"]
    assert len(found["launches"]) == LAUNCHES[case] + (case == "sketch")
