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

DISCRETE = ("slots.positions", "recent.k", "recent.v", "recent.k_scale", "recent.v_scale")
"""Ends of the names of what is chosen, or rounded, in a state: the codes of the newest tokens and their scales in float16."""

AOTI_HOST = (
    f"DISCRETE = {DISCRETE}"
    + """
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
made, logits = [], []
whole = {x["replaces"]: [] for x in step["outputs"] if (x["replaces"] or "").endswith(DISCRETE)}
for _ in range(tokens):
    outputs = run(*feeds.values())
    feeds |= {x["replaces"]: value for x, value in zip(step["outputs"], outputs) if x["replaces"]}
    feeds["ids"] = outputs[0].argmax(-1, keepdim=True)
    made.append(feeds["ids"])
    logits.append(outputs[0])
    for name, steps in whole.items():
        steps.append(feeds[name].clone())
assert not any(name.split(".")[0] == "semkv" for name in sys.modules)
whole = {name: torch.stack(steps) for name, steps in whole.items()}
save_file({"tokens": torch.cat(made, 1), "logits": torch.stack(logits, 1), **whole}, folder / "made.safetensors")
"""
)


class Made(NamedTuple):
    """Of greedy steps: tokens [B, T], logits [B, T, vocab], and by the tensor's name what is rounded or chosen in the state behind each:
    positions [T, B, H, C] of the tokens in slots, codes and scales [T, B, H, C, ...] of the newest tokens."""

    tokens: Tensor
    logits: Tensor
    discrete: dict[str, Tensor]


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
    ids, made, logits, whole = state.logits.argmax(-1, keepdim=True), [], [], defaultdict(list)
    for _ in range(tokens):
        logits.append(compiled.extend(state, ids).view(len(ids), -1))
        ids = logits[-1].argmax(-1, keepdim=True)
        made.append(ids)
        with safe_open(compiled.export_state(state, folder / "ours.safetensors"), "pt") as held:
            for name in filter(is_discrete, held.keys()):
                whole[name].append(held.get_tensor(name))
    return Made(torch.cat(made, 1), torch.stack(logits, 1), {x: torch.stack(steps) for x, steps in whole.items()})


def is_discrete(name: str | None) -> bool:
    """Whether a tensor of a state is of `DISCRETE`."""
    return name is not None and name.endswith(DISCRETE)


def in_onnxruntime(folder: Path, tokens: int = TOKENS) -> Made:
    """The same by stock onnxruntime, from `state.safetensors` in the folder."""
    import onnxruntime

    step = json.loads((folder / "step.json").read_text())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(folder / step["file"], options, providers=["CPUExecutionProvider"])
    held = load_file(folder / "state.safetensors")
    feeds = {x["name"]: held[x["name"]].numpy() for x in step["inputs"]}
    made, logits, whole = [], [], defaultdict(list)
    for _ in range(tokens):
        outputs = session.run([x["name"] for x in step["outputs"]], feeds)
        feeds |= {x["replaces"]: value for x, value in zip(step["outputs"], outputs) if x["replaces"]}
        feeds["ids"] = outputs[0].argmax(-1)[:, None]
        made.append(feeds["ids"])
        logits.append(outputs[0])
        for name in filter(is_discrete, [x["replaces"] for x in step["outputs"]]):
            whole[name].append(feeds[name])
    tensors = [torch.from_numpy(x) for x in (numpy.concatenate(made, 1), numpy.stack(logits, 1))]
    return Made(*tensors, {name: torch.from_numpy(numpy.stack(steps)) for name, steps in whole.items()})


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


def parting(own: Made, theirs: Made, row: int, bits: int) -> tuple[int, list[str]]:
    """The first step behind which a row's state is another, and what is unlike in the first layer where it is; the number of steps and
    nothing where it never is.

    A number in the middle between two codes, and two units that are as good as equal to a query: how sums are rounded decides, and what
    follows is another state. So this is one code, or scale, more or less, or other tokens in one head. bits: of a code.
    """
    first, layer, found = own.tokens.shape[1], 0, dict[str, Tensor]()
    for name in sorted(own.discrete, key=lambda name: int(name.split(".")[1])):
        mine, others = (x.discrete[name][:, row] for x in (own, theirs))
        if mine.dtype == torch.float32:
            continue
        if mine.dtype == torch.float16:
            mine, others = mine.view(torch.int16), others.view(torch.int16)
        if mine.dim() == 3:  # the order in slots says nothing
            mine, others = mine.sort(-1).values, others.sort(-1).values
        apart = (mine.long() - others.long()).abs().flatten(2).amax(-1)  # [T, H]
        steps, at = apart.amax(-1).nonzero(), int(name.split(".")[1])
        if len(steps) and (int(steps[0]) < first or (int(steps[0]) == first and at == layer)):
            found = found if int(steps[0]) == first else {}
            first, layer = int(steps[0]), at
            found[name] = apart[first]
    return first, [f"{name} by {apart.tolist()}" for name, apart in found.items() if not is_near(name, apart, bits)]


def is_near(name: str, apart: Tensor, bits: int) -> bool:
    """Whether what is apart [H] in a state is what rounding may change."""
    if name.endswith("positions"):
        return int((apart > 0).sum()) <= 1
    one = {0, 1} if bits == 8 or name.endswith("scale") else {0, 1, 15, 16, 17}  # two codes of 4 bits in a byte
    return set(apart.tolist()) <= one


def differences(
    compiled: CompiledModel, folder: Path, form: str, lengths: tuple[tuple[int, ...], ...], bits: int = 8
) -> list[str]:
    """Export, and compare `TOKENS` tokens of states of prompts of the lengths, of several batches, by one file: what is not ours, and
    operators that are not the standard's. Tokens have to be equal, and logits in all steps whose codes and choices are: half of all, at
    least."""
    compiled.export(folder, format=form)
    unlike, shared = [], []
    if form == "onnx":
        found = domains(folder / "step.onnx")
        print("domains", found)
        unlike += [] if found == {""} else [f"operators of {found}"]
    for several in lengths:
        state = reserved(compiled, several, TOKENS + 1)  # one more, so that the last state can be written too
        compiled.export_state(state, folder / "state.safetensors")
        theirs = in_onnxruntime(folder) if form == "onnx" else without_semkv(folder)
        own = ours(compiled, state, folder)
        assert own.discrete.keys() == theirs.discrete.keys()
        for row, length in enumerate(several):
            same, how = parting(own, theirs, row, bits)
            shared.append(same / TOKENS)
            equal = int((own.tokens[row] == theirs.tokens[row]).sum())
            pair = own.logits[row, :same], theirs.logits[row, :same]
            apart = float((pair[0] - pair[1]).abs().max()) if same else 0.0
            told = f"{form}, row of {length}: {equal} of {TOKENS} tokens equal, logits of {same} steps within {apart:.1e} {how}"
            print(told)
            alike = equal == TOKENS and not how and torch.allclose(*pair, rtol=1e-3, atol=1e-3)
            unlike += [] if alike else [told]
    if sum(shared) < len(shared) / 2:
        unlike.append(f"states are alike in {shared} of the steps")
    return unlike


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
