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
ROUNDING = {"float32": 2e-6, "float16": 2e-6}
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
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)


def check(found: dict, count: int, kv_dtype: str = "float32") -> None:
    assert found["calls"] == LAYERS * count
    assert 0 < found["difference"] <= ROUNDING[kv_dtype] * max(1, found["size"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "budget", "options", "kv_dtype"),
    [
        ("full", None, {}, "float32"),
        ("snapkv", 0.4, {}, "float32"),
        ("sekv", 0.5, {}, "float32"),
        ("sekv", 0.5, {"forms": "factored"}, "float16"),
        ("sketch", 0.5, {}, "float32"),
        ("mixed", 0.6, {}, "float16"),
    ],
)
def test_steps_of_every_kind_of_method_are_those_of_pytorch(artifact, method, budget, options, kv_dtype):
    check(steps(artifact, method, budget, options, 4, kv_dtype), 4, kv_dtype)
