"""Run in a process of its own, with TRITON_INTERPRET=1: steps of a saved model with Triton's kernels beside PyTorch's.

    python steps_in_triton.py ARTIFACT METHOD BUDGET OPTIONS STEPS KV_DTYPE

Prints JSON: the logits' largest difference and size, and how many calls each of Triton's kernels answered.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace

import torch

import semkv
from semkv.kernels.gate_scores import triton as gate
from semkv.kernels.mixed_attention import triton as attention
from semkv.kernels.selection import triton as selection
from semkv.kernels.sketch_scores import triton as sketch

KERNELS = {
    "attention": (attention, "attend_triton"),
    "gate": (gate, "gate_scores_triton"),
    "sketch": (sketch, "sketch_scores_triton"),
    "selection": (selection, "select_triton"),
}


def main(artifact: str, method: str, budget: str, options: str, steps: str, kv_dtype: str) -> None:
    calls: Counter[str] = Counter()
    for name, (module, function) in KERNELS.items():
        inner = getattr(module, function)

        def counted(*arguments, name=name, inner=inner, **keywords):
            calls[name] += 1
            return inner(*arguments, **keywords)

        setattr(module, function, counted)
    saved = semkv.load(artifact)
    ids = torch.randint(1, 60, (2, 120), generator=torch.Generator().manual_seed(1))
    turn = torch.randint(1, 60, (2, int(steps)), generator=torch.Generator().manual_seed(2))
    found = {}
    for kernels in ("torch", "triton"):
        config = semkv.CompileConfig(floor=0, kernels=kernels, kv_dtype=kv_dtype, extend_chunk=1)
        compiled = saved.with_method(method, json.loads(budget), config=config, **json.loads(options))
        assert compiled.kernels.startswith(kernels)
        object.__setattr__(compiled, "placement", replace(compiled.placement, steps=None))  # as steps on a GPU
        found[kernels] = compiled.extend(compiled.prefill(ids), turn, all_logits=True)
    difference = (found["torch"] - found["triton"]).abs().max()
    print(json.dumps({"difference": float(difference), "size": float(found["torch"].abs().max()), "calls": calls}))


main(*sys.argv[1:])
