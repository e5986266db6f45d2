"""Exported steps, run by who knows nothing of semkv, beside our own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from semkv.compiled import CompiledModel
from semkv.runtime.state import State

TOKENS = 30
BUDGETS: dict[str, float | None] = {
    "full": None,
    "quest": 0.25,
    "sketch": 0.25,
    "sekv": 0.25,
    "specontext": 0.5,
    "compresskv": 0.5,
    "h2o": 0.25,
    "mixed": 0.3,
}

AOTI_HOST = """
import json, sys
from pathlib import Path

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "semkv":
            raise ImportError("semkv is not installed here")

sys.meta_path.insert(0, Blocker())
import torch
from safetensors.torch import load_file, save_file
from torch._inductor import aoti_load_package

folder, tokens = Path(sys.argv[1]), int(sys.argv[2])
try:
    import semkv
except ImportError:
    pass
else:
    raise SystemExit("semkv can be imported")
step = json.loads((folder / "step.json").read_text())
run, held = aoti_load_package(str(folder / step["file"])), load_file(folder / "state.safetensors")
feeds = {x["name"]: held[x["name"]] for x in step["inputs"]}
made, logits, chosen = [], [], {x["replaces"]: [] for x in step["outputs"] if (x["replaces"] or "").endswith("slots.positions")}
for _ in range(tokens):
    outputs = run(*feeds.values())
    feeds |= {x["replaces"]: value for x, value in zip(step["outputs"], outputs) if x["replaces"]}
    feeds["ids"] = outputs[0].argmax(-1, keepdim=True)
    made.append(feeds["ids"])
    logits.append(outputs[0])
    for name, steps in chosen.items():
        steps.append(feeds[name].clone())
assert not any(name.split(".")[0] == "semkv" for name in sys.modules)
chosen = {name: torch.stack(steps) for name, steps in chosen.items()}
save_file({"tokens": torch.cat(made, 1), "logits": torch.stack(logits, 1), **chosen}, folder / "made.safetensors")
"""


class Made(NamedTuple):
    """Of greedy steps: tokens [B, T], logits [B, T, vocab], and the positions [T, B, H, C] of the tokens in slots, by the tensor's name."""

    tokens: Tensor
    logits: Tensor
    chosen: dict[str, Tensor]


def prompts(vocab: int, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Random prompts of those lengths, padded on the left, and their mask."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(vocab, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths))[None] >= max(lengths) - torch.tensor(lengths)[:, None]
    return ids, mask.long()


def reserved(compiled: CompiledModel, lengths: tuple[int, ...], tokens: int = TOKENS) -> State:
    """A state of prompts of those lengths, with room for so many tokens."""
    state = compiled.prefill(*prompts(compiled.program.vocab_size, lengths))
    state.reserve(tokens)
    return state


def ours(compiled: CompiledModel, state: State, folder: Path, tokens: int = TOKENS) -> Made:
    """What follows; the state goes on. folder: of the exported step, whose names the slots have."""
    ids, made, logits, chosen = state.logits.argmax(-1, keepdim=True), [], [], defaultdict(list)
    for _ in range(tokens):
        logits.append(compiled.extend(state, ids).view(len(ids), -1))
        ids = logits[-1].argmax(-1, keepdim=True)
        made.append(ids)
        with safe_open(compiled.export_state(state, folder / "ours.safetensors"), "pt") as held:
            for name in filter(is_choice, held.keys()):
                chosen[name].append(held.get_tensor(name))
    return Made(torch.cat(made, 1), torch.stack(logits, 1), {x: torch.stack(steps) for x, steps in chosen.items()})


def is_choice(name: str | None) -> bool:
    """Whether a tensor of a state is where the tokens in slots come from."""
    return name is not None and name.endswith("slots.positions")


def in_onnxruntime(folder: Path, tokens: int = TOKENS) -> Made:
    """The same by stock onnxruntime, from `state.safetensors` in the folder."""
    import onnxruntime

    step = json.loads((folder / "step.json").read_text())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(folder / step["file"], options, providers=["CPUExecutionProvider"])
    held = load_file(folder / "state.safetensors")
    feeds = {x["name"]: held[x["name"]].numpy() for x in step["inputs"]}
    made, logits, chosen = [], [], defaultdict(list)
    for _ in range(tokens):
        outputs = session.run([x["name"] for x in step["outputs"]], feeds)
        feeds |= {x["replaces"]: value for x, value in zip(step["outputs"], outputs) if x["replaces"]}
        feeds["ids"] = outputs[0].argmax(-1)[:, None]
        made.append(feeds["ids"])
        logits.append(outputs[0])
        for name in filter(is_choice, [x["replaces"] for x in step["outputs"]]):
            chosen[name].append(feeds[name])
    tensors = [torch.from_numpy(x) for x in (numpy.concatenate(made, 1), numpy.stack(logits, 1))]
    return Made(*tensors, {name: torch.from_numpy(numpy.stack(steps)) for name, steps in chosen.items()})


def without_semkv(folder: Path, tokens: int = TOKENS) -> Made:
    """The same by an AOTInductor package, in a process in which semkv cannot be imported."""
    command = [sys.executable, "-I", "-c", AOTI_HOST, str(folder), str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder)
    assert done.returncode == 0, done.stderr
    made = load_file(folder / "made.safetensors")
    return Made(made.pop("tokens"), made.pop("logits"), made)


def domains(file: Path) -> set[str]:
    """The operator sets that a checked ONNX file uses, functions included."""
    import onnx

    onnx.checker.check_model(str(file), full_check=True)
    model = onnx.load(str(file), load_external_data=False)
    waiting, found = [model.graph, *model.functions], {opset.domain for opset in model.opset_import}
    while waiting:
        for node in waiting.pop().node:
            found.add(node.domain)
            waiting += [x.g for x in node.attribute if x.HasField("g")]
    return found


def swap(own: Made, theirs: Made, row: int) -> tuple[int, int, str]:
    """The first step in which a row's slots hold other tokens, and in how many heads of the first layer where they do, in words too; the
    number of steps and 0 where they never do.

    Two units may be as good as equal to a query: then how sums are rounded decides between them, and what follows is another state.
    """
    first, count, how = own.tokens.shape[1], 0, ""
    for name in sorted(own.chosen, key=lambda name: int(name.split(".")[1])):
        mine, others = (x.chosen[name][:, row].sort(-1).values for x in (own, theirs))  # [T, H, C]
        heads = (mine != others).any(-1).sum(-1)
        if heads[:first].any():
            first = int(heads.nonzero()[0])
            count = int(heads[first])
            how = f"until step {first}, from which on {name} is another in {count} of {mine.shape[1]} heads"
    return first, count, how


def differences(compiled: CompiledModel, folder: Path, form: str, lengths: tuple[tuple[int, ...], ...]) -> list[str]:
    """Export, and compare `TOKENS` tokens of states of prompts of the lengths, of several batches, by one file: what is not ours, and
    operators that are not the standard's.

    Tokens have to be equal, and logits as long as slots hold the same tokens: in half of all steps at least, and then in one head at first.
    A new key between two codes of 8 bits may be rounded to either, which logits show for a step or two.
    """
    compiled.export(folder, format=form)
    unlike = []
    if form == "onnx":
        found = domains(folder / "step.onnx")
        print("domains", found)
        unlike += [] if found == {""} else [f"operators of {found}"]
    shared = []
    for several in lengths:
        state = reserved(compiled, several, TOKENS + 1)  # one more, so that the last state can be written too
        compiled.export_state(state, folder / "state.safetensors")
        theirs = in_onnxruntime(folder) if form == "onnx" else without_semkv(folder)
        own = ours(compiled, state, folder)
        assert own.chosen.keys() == theirs.chosen.keys()
        for row, length in enumerate(several):
            same, heads, how = swap(own, theirs, row)
            shared.append(same / TOKENS)
            equal = int((own.tokens[row] == theirs.tokens[row]).sum())
            apart = (own.logits[row, :same] - theirs.logits[row, :same]).abs()
            close = (apart <= 1e-3 + 1e-3 * theirs.logits[row, :same].abs()).all(-1)
            told = (
                f"{form}, row of {length}: {equal} of {TOKENS} tokens equal, logits within 1e-3 in {int(close.sum())} of {same} steps, "
                f"within {float(apart.amax()) if same else 0.0:.1e} in all {how}"
            )
            print(told)
            alike = equal == TOKENS and heads <= 1 and int(close.sum()) >= 0.9 * same and bool((apart <= 2e-2).all())
            unlike += [] if alike else [told]
    return (
        unlike if sum(shared) >= len(shared) / 2 else [*unlike, f"slots hold the same tokens in {shared} of the steps"]
    )


__all__ = [
    "BUDGETS",
    "TOKENS",
    "Made",
    "differences",
    "domains",
    "in_onnxruntime",
    "ours",
    "prompts",
    "reserved",
    "without_semkv",
]
