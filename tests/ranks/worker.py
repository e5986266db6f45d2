"""A process among those of RANK, WORLD_SIZE: compiles or loads a model, runs methods, and writes tokens and logits."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import semkv
from semkv.errors import SemkvError

SETTINGS = semkv.CompileConfig(floor=0, kernels="torch")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(vocab_size=97, max_position_embeddings=512, **SIZES))
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(4.0) if weight.dim() > 1 else None  # attention that looks at some tokens more than at others
    return made.double().eval()


def run(compiled: semkv.CompiledModel) -> dict[str, object]:
    """Tokens and logits of a prompt of 260 tokens and 24 steps; bytes that the row's tensors take, and the most that a step did."""
    ids = torch.randint(1, compiled.program.vocab_size, (1, 260), generator=torch.Generator().manual_seed(0))
    state = compiled.prefill(ids)
    tokens, logits = [], [state.logits.clone()]
    for _ in range(24):
        new = state.logits.argmax(-1)
        tokens.append(int(new))
        compiled.extend(state, new[:, None])
        logits.append(state.logits.clone())
    (row,) = state.rows
    held = sum(x.nbytes for memory in row.memories() for part in (memory.kept, memory.recent) for x in part.buffers)
    updates = sum(int(x[1]) for name, x in row.notes.items() if name.startswith("pivot.checks"))
    keys = sum(x.nbytes for name, x in row.notes.items() if name.startswith("retrieval.keys"))
    counted = [*state.nbytes.values(), *asdict(compiled.request_bytes(300)).values()]
    return {
        "tokens": tokens,
        "logits": torch.cat(logits),
        "held": held,
        "updates": updates,
        "keys": keys,
        "peak": state.nbytes["peak"],
        "counted": counted,
    }


def results(jobs: list[list], source: str, group: dist.ProcessGroup | None) -> dict[str, dict[str, object]]:
    """By job, method, budget and options: `run` of it; an error's text where it is refused. source: an artifact, which is a job of its own
    where there are no others, or "" for a capture."""
    whole = (
        semkv.load(source, group=group)
        if source
        else semkv.compile(model(), method="full", config=SETTINGS, group=group)
    )
    if not jobs:
        return {"loaded": run(whole)}
    made: dict[str, dict[str, object]] = {}
    for job in jobs:
        method, budget, *options = job
        try:
            made[label(job)] = run(
                whole if method == "full" else whole.with_method(method, budget, **(options[0] if options else {}))
            )
        except SemkvError as error:
            made[label(job)] = {"error": str(error)}
    return made


def label(job: list) -> str:
    return json.dumps(job)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = results(json.loads(sys.argv[1]), sys.argv[2], dist.group.WORLD)
    torch.save(found, Path(sys.argv[3]) / os.environ["RANK"])
    dist.destroy_process_group()
