"""SmolLM2-135M behind the OpenAI API: semkv's model in vLLM beside vLLM's own, by users at once, timed by vLLM's own benchmark.

    python -m benchmarks.speed.serving                       # half an hour on two cores; in the environment of `make test-serving`
    python -m benchmarks.speed.serving --users 1,4 --systems native,full
    python -m benchmarks.speed.serving --memory              # a minute: the memory of a request alone, beside times that were measured

Each user asks one request after the other: a prompt of 2,048 random tokens, and 32 tokens of an answer.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import semkv
from benchmarks.lib.grids import measured_on, table, write_document
from benchmarks.lib.places import RESULTS
from benchmarks.lib.real_model import MODELS, fetch
from benchmarks.lib.servers import SETTINGS, listening, native_command
from semkv.cli.models import load_model
from semkv.evaluation.environment import describe, now
from semkv.io.cache_folder import cache_folder

PROMPT, ANSWER, LONGEST = 2048, 32, 4096
MEMORY = 4
"""GiB for requests, of each server."""
SYSTEMS = {
    "native": None,
    "full": ["--method", "full"],
    "snapkv": ["--method", "snapkv", "--budget", "0.1"],
    "quest": ["--method", "quest", "--budget", "0.1"],
}
BENCH = """import argparse, sys
from vllm.benchmarks.serve import add_cli_args, main
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser
except ImportError:
    Parser = argparse.ArgumentParser
parser = Parser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve`, whose command the wheel for CPUs does not start."""
FIGURES = {
    "mean_ttft_ms": "first token, s",
    "mean_tpot_ms": "each further token, ms",
    "output_throughput": "tokens of answers a second",
    "duration": "all requests, s",
}


def timed(url: str, tokenizer: Path, users: int, folder: Path) -> dict[str, float]:
    """The figures of `users` at once, two requests of a user alone and one of each of several."""
    out = folder / f"{users}.json"
    words = {
        "--base-url": url,
        "--model": "served",
        "--tokenizer": str(tokenizer),
        "--dataset-name": "random",
        "--random-input-len": PROMPT,
        "--random-output-len": ANSWER,
        "--num-prompts": max(2, users),
        "--max-concurrency": users,
        "--num-warmups": 1,
        "--seed": users,
        "--result-dir": str(folder),
        "--result-filename": out.name,
    }
    given = [str(word) for pair in words.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-c", BENCH, *given, "--ignore-eos", "--save-result"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"vLLM's benchmark failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found = json.loads(out.read_text())
    if found["completed"] != words["--num-prompts"]:
        raise SystemExit(f"{found['completed']} of {words['--num-prompts']} requests were answered")
    return {name: found[name] for name in (*FIGURES, "completed", "total_output_tokens")}


def device_bytes(model: Any) -> dict[str, int]:
    """Bytes of KV that a request of `PROMPT` and `ANSWER` tokens has on the device at most, by system; vLLM's own model has the full KV."""
    found = {}
    for system, arguments in SYSTEMS.items():
        words = dict(zip(arguments[::2], arguments[1::2], strict=True)) if arguments else {"--method": "full"}
        budget = words.get("--budget")
        compiled = semkv.compile(model, method=words["--method"], budget=None if budget is None else float(budget))
        found[system] = compiled.request_bytes(PROMPT + ANSWER, prompt=PROMPT).device
    full = sum(site.values_per_token for site in compiled.program.stores) * compiled.dtype.itemsize
    return found | {"native": full * (PROMPT + ANSWER)}


def publish(content: dict[str, Any]) -> Path:
    """docs/results/serving.md."""
    lines = []
    for row in content["rows"]:
        figures = row["figures"]
        shown = (
            f"{figures['mean_ttft_ms'] / 1e3:.1f}",
            f"{figures['mean_tpot_ms']:.0f}",
            f"{figures['output_throughput']:.2f}",
            f"{figures['duration']:.0f}",
        )
        memory = content["device_bytes"][row["system"]] / 1e6
        lines.append([f"`{row['system']}`", str(row["users"]), f"{memory:.1f}", *shown])
    return write_document(
        "serving",
        "# SmolLM2-135M behind the OpenAI API",
        "Made by `benchmarks/speed/serving.py`; do not edit.",
        f"SmolLM2-135M-Instruct in float32, prompts of {PROMPT:,} random tokens, answers of {ANSWER}, each user one request (two of a user "
        "alone), timed by `vllm bench serve`. `native` is vLLM's own model with the same weights, the others are semkv's in vLLM; those "
        f"that compress have 10 %. {MEMORY} GiB for requests, one thread, no prefix cache. Means; a single run of a shared machine: "
        "small differences say nothing. The KV is `request_bytes` of such a request, after its prompt, by which the server admits; "
        "of vLLM's own model, the keys and values of all tokens. Reading prompts takes most of the time: "
        "a token waits for pieces of the prompts of others.",
        table(["system", "users", "KV on the device, MB a user", *FIGURES.values()], lines),
        "## Provenance",
        measured_on(content["environment"]),
    )


def main() -> None:
    """Start each server, time it, write the figures and their page."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--systems", default="native,full,snapkv", help=f"of {', '.join(SYSTEMS)} (%(default)s)")
    options.add_argument("--users", default="1,4,16", help="at once (%(default)s)")
    options.add_argument(
        "--out", type=Path, help="write the figures here, in place of benchmarks/results and docs/results"
    )
    options.add_argument("--memory", action="store_true", help="only add a request's memory to figures that are there")
    asked, started = options.parse_args(), now()
    model = fetch(MODELS["smollm2"], cache_folder() / "models")
    if asked.memory:
        content = json.loads((RESULTS / "serving.json").read_text(encoding="utf-8"))
        write(content | {"device_bytes": device_bytes(load_model(str(model)).model)}, None)
        return
    rows = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        loaded = load_model(str(model))
        loaded.model.save_pretrained(folder / "model")
        loaded.tokenizer.save_pretrained(folder / "model")
        memory = device_bytes(loaded.model)
        del loaded
        for system in asked.systems.split(","):
            arguments = SYSTEMS[system]
            if arguments is None:
                command, more = native_command(folder / "model", LONGEST), {"VLLM_CPU_KVCACHE_SPACE": str(MEMORY)}
            else:
                words = ["--name", "served", "--memory", f"{MEMORY}GiB", "--max-model-len", str(LONGEST)]
                command, more = ["semkv", "serve", str(model), *words, *arguments], {}
            with listening(command, folder / "server.log", **more) as url:
                for users in map(int, asked.users.split(",")):
                    rows.append(
                        {"system": system, "users": users, "figures": timed(url, folder / "model", users, folder)}
                    )
                    print(json.dumps(rows[-1]), flush=True)
    environment = describe(started).model_dump(mode="json")
    environment["versions"]["vllm-cpu"] = importlib.metadata.version("vllm-cpu")
    environment |= {
        "command": " ".join(["python -m benchmarks.speed.serving", *sys.argv[1:]]),
        "threads": int(SETTINGS["OMP_NUM_THREADS"]),
    }
    sizes = {"prompt": PROMPT, "answer": ANSWER, "device_bytes": memory}
    write({**sizes, "rows": rows, "environment": environment}, asked.out)


def write(content: dict[str, Any], out: Path | None) -> None:
    """The figures, and their page where they are the published ones."""
    path = out or RESULTS / "serving.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(out or publish(content))


if __name__ == "__main__":
    main()
