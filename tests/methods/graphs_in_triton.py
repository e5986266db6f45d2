"""Run in a process of its own, with TRITON_INTERPRET=1: decode steps as one graph with Triton's kernels beside PyTorch's.

    python graphs_in_triton.py STEPS DTYPE '{"CASE": [METHOD, BUDGET, OPTIONS], ...}'

Prints JSON, by case: the logits' largest difference and size, whether all tokens are the same, and what the turn of each layer launches.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode

import semkv
from semkv import bundled
from semkv.kernels import generation
from semkv.runtime.decode.step_graph import SITE

PROMPT = 330
BFLOAT16 = Path(__file__).parents[1] / "kernels/interpreted_bfloat16.py"
VIEWS = {
    "view",
    "_unsafe_view",
    "unsqueeze",
    "squeeze",
    "expand",
    "select",
    "slice",
    "unbind",
    "alias",
    "detach",
    "as_strided",
    "transpose",
}
NOTHING = VIEWS | {
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "_reshape_alias",
    "permute",
    "t",
    "split",
    "split_with_sizes",
    "lift_fresh",
}
"""Operators of PyTorch that launch nothing."""


class Counted(TorchDispatchMode):
    """Names of what is launched: PyTorch's operators, and Triton's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.within = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if not self.within and name not in NOTHING:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class ByTurn(Interpreter):
    """Runs a step's graph; `launched` has the names of what each site's turn launches."""

    def __init__(self, module: GraphModule, counted: Counted) -> None:
        super().__init__(module)
        self.counted = counted
        self.launched: dict[int, list[str]] = defaultdict(list)

    def run_node(self, n: Node) -> Any:
        self.counted.names.clear()
        made = super().run_node(n)
        if SITE in n.meta:
            self.launched[n.meta[SITE]] += self.counted.names
        return made


def watched(counted: Counted) -> None:
    """Launches of Triton's kernels are counted, and what its interpreter does is not."""
    inner = generation.Launch.run

    def run(launch: generation.Launch) -> None:
        counted.names.append(launch.kernel.__name__)
        counted.within = True
        inner(launch)
        counted.within = False

    generation.Launch.run = run


def turns_of(compiled: semkv.CompiledModel, state: semkv.State, ids: Tensor, counted: Counted) -> dict[int, list[str]]:
    """What each site's turn launches in a step."""
    graph, found = list(compiled.placement.steps.graphs._graphs.values())[-1], {}

    def counting(*inputs: Any, behind: Any = ()) -> Any:
        by_turn = ByTurn(graph.module, counted)
        with counted:
            made = by_turn.run(*inputs, *behind)
        found.update(by_turn.launched)
        return made

    object.__setattr__(graph, "run", counting)
    compiled.extend(state, ids)
    return found


def main(steps: str, dtype: str, cases: str) -> None:
    told, counted = {}, Counted()
    watched(counted)
    exec(BFLOAT16.read_text(), {})
    settings = {"floor": 0, "kv_dtype": "float16" if dtype == "float32" else dtype, "extend_chunk": 1}
    model = bundled.load()[0].to(getattr(torch, dtype))
    base = semkv.compile(model, bundled.profile(), method="full", config=semkv.CompileConfig(floor=0, cache=True))
    ids = torch.randint(3, 600, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    turn = torch.randint(3, 600, (1, int(steps)), generator=torch.Generator().manual_seed(2))
    for case, (method, budget, options) in json.loads(cases).items():
        found = {}
        for kernels in ("torch", "triton"):
            config = semkv.CompileConfig(kernels=kernels, **settings)
            compiled = base.with_method(method, budget, config=config, **options)
            state = compiled.prefill(ids)
            found[kernels] = compiled.extend(state, turn, all_logits=True)
        launches = turns_of(compiled, state, turn[:, :1], counted)
        told[case] = {
            "difference": float((found["torch"] - found["triton"]).abs().max()),
            "size": float(found["torch"].abs().max()),
            "same": torch.equal(found["torch"].argmax(-1), found["triton"].argmax(-1)),
            "launches": max(launches.values(), key=len),
        }
    print(json.dumps(told))


main(*sys.argv[1:])
