"""The examples run as they stand, in a fresh process, and say what they should."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def output(name):
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_example_is_tested():
    tested = {
        "quickstart.py",
        "several_turns.py",
        "save_and_load.py",
        "onnx_loop.py",
        "continuous_batching.py",
        "tensor_parallel.py",
    }
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == tested


@pytest.mark.slow
def test_quickstart_shows_answers_and_a_memory_within_budget():
    lines = output("quickstart.py").splitlines()
    values = {line.split(":")[0].strip(): line.split(":", 1)[1].strip() for line in lines}
    assert values["full KV"] == values["right answer"]
    assert len(values["a tenth of it"].split()) == 3
    share = float(values["peak"].split(",")[1].split("%")[0])
    assert 0.0 < share <= 10.0


@pytest.mark.slow
def test_several_turns_reads_the_text_once():
    lines = output("several_turns.py").splitlines()
    assert len(lines) == 7
    assert all(" -> " in line and "(right: " in line for line in lines[:6])
    assert lines[6].startswith("the conversation now has ")


@pytest.mark.slow
def test_save_and_load_gives_the_same_tokens_in_a_fresh_process():
    lines = output("save_and_load.py").splitlines()
    assert lines[0].startswith("saved ")
    here, there = (line.split(":", 1)[1].strip() for line in lines[1:3])
    assert here == there != ""


@pytest.mark.slow
def test_onnx_loop_gives_our_tokens_without_semkv():
    pytest.importorskip("onnxruntime", reason="semkv[onnx] is not installed")
    lines = output("onnx_loop.py").splitlines()
    assert "step.onnx.data" in lines[-3]
    ours, theirs = (line.split(":", 1)[1].strip() for line in lines[-2:])
    assert ours == theirs != ""


def test_continuous_batching_answers_all_but_who_fails():
    lines = output("continuous_batching.py").splitlines()
    told = {line.split(",")[0]: line.split(": ", 1)[1] for line in lines}
    assert told.pop("broken").startswith("input ids reach from -1 to -1")
    assert told.pop("too long").endswith("bytes, more than there are")
    assert sorted(told) == [f"user {number}" for number in range(5)]
    for text in told.values():
        answer, right = text.removesuffix(")").split(" (right: ")
        assert answer == right


@pytest.mark.slow
def test_two_processes_share_a_model():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    result = subprocess.run(
        [*command, str(ROOT / "examples" / "tensor_parallel.py")],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    shares = [line for line in result.stdout.splitlines() if line.startswith("process ")]
    assert len(shares) == 2
    assert all(int(line.split("%")[0].split()[-1]) <= 60 for line in shares)
