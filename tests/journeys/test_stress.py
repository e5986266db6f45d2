"""The stress run: short, and what it tells apart."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from hostile import Chaos, modes
from journey import Desk, difference
from stress import Task, Watch, arguments, run_task, supervise

STRESS = Path(__file__).parent / "stress.py"
SOME = (
    "chat_passing_new_tokens_alone",
    "batch_padded_on_the_left",
    "users_that_share_a_system_prompt",
    "queue_of_requests",
)


@pytest.mark.slow
def test_half_a_minute_of_it():
    command = [sys.executable, str(STRESS), "--minutes", "0.5", "--seed", "7", "--texts", "1", "--only", *SOME]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "seed 7: 4 journeys, 4 threads in 2 processes" in run.stdout
    assert "0 wrong, 0 processes broken" in run.stdout.splitlines()[-1]


def test_what_is_wrong_is_said(tmp_path):
    class One:
        def __init__(self, made):
            self.made = made

        def run(self, form, desk):
            if isinstance(self.made, BaseException):
                raise self.made
            return self.made

    task, desk = Task("chat", 0, "full"), Desk(None, None, tmp_path)
    assert run_task(task, One([1, 2]), None, desk, [1, 2]) is None
    assert run_task(task, One([1, 3]), None, desk, [1, 2]) == difference([1, 3], [1, 2]) == "result[1]: 3, expected 2"
    assert "KeyboardInterrupt" in run_task(task, One(KeyboardInterrupt()), None, desk, [1])
    assert "ValueError: no" in run_task(task, One(ValueError("no")), None, desk, [1])


def test_a_process_that_is_killed_is_reported(tmp_path, capsys):
    (tmp_path / "A.jsonl").write_text(
        '{"event": "begin", "thread": 0, "key": "chat 0 full"}\n'
        '{"event": "end", "thread": 0, "key": "chat 0 full", "wrong": "result: 1, expected 2"}\n'
        '{"event": "begin", "thread": 1, "key": "queue 1 compressed"}\n'
    )
    (tmp_path / "A.err").write_text("Fatal Python error: Segmentation fault")

    class Killed:
        exitcode = -11

        def is_alive(self):
            return False

        def join(self):
            pass

    watch = Watch(tmp_path, ["A"])
    (broken,) = supervise({"A": Killed()}, watch, 1.0, tmp_path)
    assert broken.startswith("process A: SIGSEGV; in it: queue 1 compressed\nFatal Python error")
    assert watch.failed == {"chat 0 full": 1}
    assert "WRONG: chat 0 full (process A, thread 0)\nresult: 1, expected 2" in capsys.readouterr().out


@pytest.mark.slow
def test_the_surroundings_are_hostile():
    """Modes of a thread, and defaults of the process, do change, and come back."""
    seen = set()
    for seed in range(40):
        with modes(random.Random(seed)):
            seen |= {("device", torch.get_default_device().type), ("inference", torch.is_inference_mode_enabled())}
            seen |= {("grad", torch.is_grad_enabled()), ("autocast", torch.is_autocast_enabled("cpu"))}
    assert len(seen) == 8
    threads, filters = torch.get_num_threads(), warnings.filters[:]
    chaos = Chaos(random.Random(1), longest=0.002)
    dtypes = set()
    chaos.start()
    try:
        while chaos.turns < 60:
            dtypes.add(torch.get_default_dtype())
            time.sleep(0.001)
    finally:
        chaos.stop()
        torch.set_num_threads(threads)
        warnings.filters[:] = filters
    assert len(dtypes) > 1
    assert torch.get_default_dtype() == torch.float32


def test_arguments_are_looked_at(capsys):
    made = arguments(["--minutes", "2", "--seed", "3"])
    assert (made.minutes, made.seed, made.threads) == (2.0, 3, 4)
    assert "workers_that_load_the_artifact" not in made.only
    assert len(made.only) >= 25
    for given, message in (
        (["--only", "nothing"], "no such journeys: nothing; there are: "),
        (["--threads", "1"], "--threads 2 or more"),
        (["--minutes", "0"], "--minutes is more than 0"),
    ):
        with pytest.raises(SystemExit):
            arguments(given)
        assert message in capsys.readouterr().err
