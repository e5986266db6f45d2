"""A server as users start it, `semkv serve`, and the vLLM that its answers are compared with."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import pytest

from benchmarks.lib.servers import listening, native_command

ROOT = Path(__file__).parents[2]


class Server:
    """A server that listens: its address, and what it says of itself."""

    model = "served"

    def __init__(self, url: str) -> None:
        self.url = url

    @cached_property
    def client(self):
        """The official client."""
        import openai

        own = {
            "Connection": "close"
        }  # the server closes what idles for five seconds, perhaps while a request is on its way
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300, default_headers=own)

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
        """What the one worker holds; see `SemkvWorker.semkv_report`."""
        (found,) = self.reports()
        return found

    def reports(self) -> list[dict[str, int]]:
        """What each worker holds."""
        request = urllib.request.Request(
            f"{self.url}/collective_rpc",
            json.dumps({"method": "semkv_report"}).encode(),
            {"Content-Type": "application/json"},
        )
        return json.load(urllib.request.urlopen(request, timeout=60))["results"]

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


@contextmanager
def serving(command: list[str], log: Path, **environment: str) -> Iterator[Server]:
    """The server that `command` starts, until the block ends."""
    with listening(command, log, VLLM_SERVER_DEV_MODE="1", **environment) as url:
        yield Server(url)


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
        [sys.executable, "-m", "benchmarks.lib.real_model"], cwd=ROOT, capture_output=True, text=True, check=False
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
    command = native_command(folder / "model", 2048)
    with serving(command, folder / "server.log", VLLM_CPU_KVCACHE_SPACE="1") as server:
        yield server
