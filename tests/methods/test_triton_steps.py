"""Whole steps with Triton's kernels, in its interpreter, give the logits of PyTorch's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')

LAYERS = 2
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
    script = Path(__file__).parent / "steps_in_triton.py"
    arguments = [str(artifact), method, json.dumps(budget), json.dumps(options), str(count), kv_dtype]
    ran = subprocess.run(
        [sys.executable, str(script), *arguments],
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
        ("sekv", 0.5, {}, "float32", {"gate", "selection"}),
        ("sekv", 0.5, {"forms": "factored"}, "float16", {"gate", "selection"}),
        ("sketch", 0.5, {}, "float32", {"sketch", "selection"}),
        ("mixed", 0.6, {}, "float16", {"sketch", "selection"}),
    ],
)
def test_steps_of_every_kind_of_method_are_those_of_pytorch(artifact, method, budget, options, kv_dtype, routed):
    found = steps(artifact, method, budget, options, 3, kv_dtype)
    assert found["calls"].pop("attention") == LAYERS * 3
    assert set(found["calls"]) >= routed
    assert 0 < found["difference"] <= ROUNDING * max(1, found["size"])
