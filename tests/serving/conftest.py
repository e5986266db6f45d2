"""A server as users start it, `semkv serve`, and the vLLM that its answers are compared with."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STARTS_WITHIN = 400
"""Seconds: two cores that others use too import vLLM in three processes, one after the other."""


class Server:
    """A server that listens: its address, and what it says of itself."""

    model = "served"

    def __init__(self, url: str) -> None:
        self.url = url

    @cached_property
    def client(self):
        """The official client."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)

    def complete(self, prompt, **options):
        """The first choice of a completion, greedy unless `options` say otherwise."""
        options = {"max_tokens": 12, "temperature": 0} | options
        return self.client.completions.create(model=self.model, prompt=prompt, **options).choices[0]

    def metrics(self) -> dict[str, float]:
        """Of each metric the sum over its labels."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=60).read().decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.split("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def report(self) -> dict[str, int]:
        """What the worker holds; see `SemkvWorker.semkv_report`."""
        request = urllib.request.Request(
            f"{self.url}/collective_rpc",
            json.dumps({"method": "semkv_report"}).encode(),
            {"Content-Type": "application/json"},
        )
        (found,) = json.load(urllib.request.urlopen(request, timeout=60))["results"]
        return found

    def settled(self) -> dict[str, int]:
        """The report once no request runs or waits."""
        for _ in range(120):
            metrics = self.metrics()
            if metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"] == 0:
                report = self.report()
                if report["requests"] == 0:
                    return report
            time.sleep(0.5)
        raise AssertionError(f"requests are left: {self.report()}")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def serving(command: list[str], log: Path, **environment: str) -> Iterator[Server]:
    """The server that `command` starts on the port put behind it, until the block ends."""
    port = free_port()
    settings = os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **environment,
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=out, stderr=subprocess.STDOUT, env=settings, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(STARTS_WITHIN):
            if process.poll() is not None:
                raise AssertionError(f"{command} ended with {process.returncode}:\n{log.read_text()[-6000:]}")
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        else:
            raise AssertionError(f"{command} does not answer:\n{log.read_text()[-6000:]}")
        yield Server(url)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


@pytest.fixture(scope="session")
def vllm():
    """Skips where the servers cannot run."""
    for name in ("vllm", "openai"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: `make test-serving` makes an environment with it")


@pytest.fixture(scope="session")
def weights(vllm) -> Path:
    """The GGUF file of a small real model."""
    found = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "real_model.py")], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    return Path(found.stdout.strip())


@pytest.fixture(scope="session")
def semkv_server(vllm, tmp_path_factory):
    """`semkv_server(model, *options)`: a server as users start it; its model is called `served`."""

    def start(model: str | Path, *options: str):
        command = ["semkv", "serve", str(model), "--name", "served", *options]
        return serving(command, tmp_path_factory.mktemp("semkv") / "server.log")

    return start


@pytest.fixture(scope="session")
def native(weights, tmp_path_factory) -> Iterator[Server]:
    """vLLM's own model with the same weights."""
    from semkv.cli.models import load_model

    folder = tmp_path_factory.mktemp("native")
    loaded = load_model(str(weights))
    loaded.model.save_pretrained(folder / "model")
    loaded.tokenizer.save_pretrained(folder / "model")
    words = "--dtype float32 --max-model-len 2048 --enforce-eager --no-enable-prefix-caching --served-model-name served"
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder / "model"),
        *words.split(),
    ]
    with serving(command, folder / "server.log", VLLM_CPU_KVCACHE_SPACE="1") as server:
        yield server
