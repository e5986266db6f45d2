"""Servers of the OpenAI API as processes, started for a measurement or a test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STARTS_WITHIN = 1200
"""Seconds: two cores that others use too import vLLM in three processes, one after the other, and may compile first."""
SETTINGS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
"""Of the environment: a thread for the worker, on whichever core is free."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def listening(
    command: list[str], log: Path, ready: str = "/health", within: int = STARTS_WITHIN, **environment: str
) -> Iterator[str]:
    """The address of the server that `command` starts, with a free port put behind it, until the block ends.

    log: what it writes. ready: what answers once it does; within: so many seconds. Raises AssertionError, with the end of the log, where
    the server ends or does not answer.
    """
    port = free_port()
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    settings = os.environ | SETTINGS | path | environment
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=out, stderr=subprocess.STDOUT, env=settings, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(within):
            if process.poll() is not None:
                raise AssertionError(f"{command} ended with {process.returncode}:\n{log.read_text()[-6000:]}")
            try:
                urllib.request.urlopen(f"{url}{ready}", timeout=5)
                break
            except OSError:
                time.sleep(1)
        else:
            raise AssertionError(f"{command} does not answer:\n{log.read_text()[-6000:]}")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def native_command(model: Path, longest: int) -> list[str]:
    """vLLM with its own model: a Hugging Face folder, in float32, without a prefix cache, as semkv's is run."""
    words = (
        "--dtype float32 --enforce-eager --no-enable-prefix-caching --no-async-scheduling --served-model-name served"
    )
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return [*server, "--max-model-len", str(longest), *words.split()]
