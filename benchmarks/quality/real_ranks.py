"""SmolLM2-135M on processes that share it, against one process that has it alone: tokens, logits, and the bytes of each.

    torchrun --nproc-per-node 3 benchmarks/quality/real_ranks.py     # some minutes of two cores; writes benchmarks/results/real_ranks.json

The first process compiles the model, saves it, and reads the prompt with each method alone. Then all load the artifact with `group=`;
methods whose heads divide the budget have artifacts of their own, as their heads are dealt by it. The model has three KV heads, and is in
float32: sums in another order round to other codes here and there.
`python -m benchmarks.quality.among_ranks --table` puts the figures on its page.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import semkv
from benchmarks.lib.places import RESULTS, ROOT
from benchmarks.lib.real_model import MODELS, fetch
from benchmarks.quality.real import texts
from semkv.cli.models import load_model
from semkv.evaluation.environment import describe, now
from semkv.io.cache_folder import cache_folder

METHODS = {
    "full": None,
    **dict.fromkeys(("sketch", "mixed", "compresskv", "sentencekv", "specontext", "quest"), 0.1),
    **dict.fromkeys(("sekv", "snapkv", "heterocache"), 0.2),
}
OPTIONS: dict[str, dict[str, Any]] = {"heterocache": {"strict": True}}
PROFILE = ROOT / "profiles" / "smollm2_135m"
PROMPT, STEPS, LONGEST = 1500, 24, timedelta(minutes=60)


def divides(method: str) -> bool:
    """Whether heads divide the budget, so that which heads a process has follows from the method."""
    return semkv.methods.find_method(method, {}).divides_heads


def of_method(whole: semkv.CompiledModel, method: str) -> semkv.CompiledModel:
    if method == whole.method.name:
        return whole
    return whole.with_method(method, METHODS[method], **OPTIONS.get(method, {}))


def answer(whole: semkv.CompiledModel, method: str, ids: Tensor) -> dict[str, Any]:
    """Greedy tokens after `ids` [1, T], logits float32 [STEPS + 1, V], the most bytes that the state held, and seconds."""
    began = time.perf_counter()
    compiled = of_method(whole, method)
    state = compiled.prefill(ids)
    tokens, logits = [], [state.logits.clone()]
    for _ in range(STEPS):
        token = state.logits.argmax(-1)
        tokens.append(int(token))
        compiled.extend(state, token[:, None])
        logits.append(state.logits.clone())
    seconds = time.perf_counter() - began
    return {"tokens": tokens, "logits": torch.cat(logits), "peak": state.nbytes["peak"], "seconds": seconds}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    methods, started = options.parse_args().methods, now()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LONGEST)
    first, alone = dist.get_rank() == 0, {}
    with tempfile.TemporaryDirectory() as folder:
        given: list[Any] = [folder, None]
        if first:
            loaded = load_model(str(fetch(MODELS["smollm2"], cache_folder() / "models")), PROFILE)
            settings = semkv.CompileConfig(floor=0)
            whole = semkv.compile(loaded.model, loaded.profile, method="full", config=settings)
            whole.save(Path(folder) / "full")
            for method in filter(divides, methods):
                of_method(whole, method).save(Path(folder) / method)
            read = loaded.tokenizer(texts()["judged"]["manual"], return_tensors="pt").input_ids
            given[1] = read[:, :PROMPT]
            alone = {method: answer(whole, method, given[1]) for method in methods}
        dist.broadcast_object_list(given)
        shared = semkv.load(Path(given[0]) / "full", group=dist.group.WORLD)
        rows = []
        for method in methods:
            own = semkv.load(Path(given[0]) / method, group=dist.group.WORLD) if divides(method) else shared
            made = answer(own, method, given[1])
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, made)
            if first:
                rows.append(compare(method, alone[method], every))
                print(rows[-1], flush=True)
        dist.barrier()
    if first:
        (note,) = (note for note in shared.program.notes if note.startswith("shard_heads"))
        environment = describe(started).model_dump(mode="json")
        environment["command"] = f"torchrun --nproc-per-node {dist.get_world_size()} benchmarks/quality/real_ranks.py"
        content = {"rows": rows, "cut": note, "environment": environment}
        (RESULTS / "real_ranks.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def compare(method: str, alone: dict[str, Any], every: list[dict[str, Any]]) -> dict[str, Any]:
    """A line: whether all tokens are those of one process, how far logits are from its (relative to the largest), shares of its bytes."""
    largest = float(alone["logits"].abs().max())
    return {
        "method": method,
        "budget": METHODS[method],
        "equal": all(each["tokens"] == alone["tokens"] for each in every),
        "difference": max(float((each["logits"] - alone["logits"]).abs().max()) for each in every) / largest,
        "peak": [round(each["peak"] / alone["peak"], 3) for each in every],
        "seconds": [round(x["seconds"], 1) for x in (alone, every[0])],
    }


if __name__ == "__main__":
    main()
