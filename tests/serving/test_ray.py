"""Two replicas behind Ray Serve LLM's OpenAI application, as users start them; skipped where Ray is not installed."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import semkv
from benchmarks.lib.servers import SETTINGS, free_port, listening

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CPUS = "8"
"""That Ray is told of: each replica, its engine and what stands before them take one, however many there are."""
OF_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0"}
"""Of the environment: a token would be written to the home folder; each line of the replicas is asked for."""
PROMPTS = tuple("the late drivers loaded the trains . " * times + "the sailors" for times in (3, 40, 90, 150))


@pytest.fixture(scope="module")
def cluster(vllm):
    """The address of a Ray of its own."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: `make test-serving` makes an environment with it")
    address = f"127.0.0.1:{free_port()}"
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus", CPUS]
    command += ["--object-store-memory", "200000000", "--include-dashboard", "false", "--port", address.split(":")[1]]
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [*command, "--temp-dir", folder],
            env=os.environ | SETTINGS | OF_RAY,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        yield address
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def test_two_replicas(cluster, tmp_path):
    """Each answer is what the compiled model generates without a server; both replicas answer; an unknown model is refused."""
    log = tmp_path / "server.log"
    words = "--method quest --budget 0.25 --memory 200MB --max-model-len 2K --ray --replicas 2"
    command = ["semkv", "serve", "bundled", "--name", "served", *words.split()]
    model, tokenizer = semkv.bundled.load()
    compiled = semkv.compile(model, method="quest", budget=0.25)
    expected = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = compiled.generate(ids, max_new_tokens=8, do_sample=False)
        assert torch.equal(made[:, : ids.shape[1]], ids)
        expected.append(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
    with listening(command, log, ready="/v1/models", within=1200, RAY_ADDRESS=cluster, **OF_RAY) as url:
        import openai

        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)

        def ask(prompt: str) -> str:
            options = {"model": "served", "max_tokens": 8, "temperature": 0}
            return client.completions.create(prompt=prompt, **options).choices[0].text

        assert [ask(prompt).strip() for prompt in PROMPTS] == [text.strip() for text in expected]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, PROMPTS * 6))
        assert [text.strip() for text in found] == [text.strip() for text in expected] * 6
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="the", max_tokens=1)
        replicas = set(re.findall(r"semkv_LLMServer:served (\w+) \S+ -- CALL completions OK", log.read_text()))
        print(f"{len(PROMPTS) * 7} answers, of {len(replicas)} replicas")
        assert len(replicas) == 2
