"""A process among those of RANK, WORLD_SIZE: compiles or loads a model, runs methods, and writes tokens and logits."""

from __future__ import annotations

import json
import os
import sys
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
    """Tokens and logits of a prompt of 260 tokens and 24 steps; bytes that the row's tensors take."""
    ids = torch.randint(1, 97, (1, 260), generator=torch.Generator().manual_seed(0))
    state = compiled.prefill(ids)
    tokens, logits = [], [state.logits.clone()]
    for _ in range(24):
        new = state.logits.argmax(-1)
        tokens.append(int(new))
        compiled.extend(state, new[:, None])
        logits.append(state.logits.clone())
    stores = [memory for row in state.rows for memories in row.stores.values() for memory in memories]
    held = sum(x.nbytes for memory in stores for part in (memory.kept, memory.recent) for x in part.buffers)
    return {"tokens": tokens, "logits": torch.cat(logits), "held": held}


def results(jobs: list[list], source: str, group: dist.ProcessGroup | None) -> dict[str, dict[str, object]]:
    """By method: `run` of it at its budget; an error's text where it is refused. source: an artifact, or "" for a capture."""
    if source:
        return {"loaded": run(semkv.load(source, group=group))}
    whole = semkv.compile(model(), method="full", config=SETTINGS, group=group)
    made: dict[str, dict[str, object]] = {}
    for method, budget in jobs:
        try:
            made[method] = run(whole if method == "full" else whole.with_method(method, budget))
        except SemkvError as error:
            made[method] = {"error": str(error)}
    return made


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = results(json.loads(sys.argv[1]), sys.argv[2], dist.group.WORLD)
    torch.save(found, Path(sys.argv[3]) / os.environ["RANK"])
    dist.destroy_process_group()
