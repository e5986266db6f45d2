"""Exported steps, run by who knows nothing of semkv, beside our own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy
import torch
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
made, logits = [], []
for _ in range(tokens):
    outputs = run(*feeds.values())
    feeds |= {x["replaces"]: value for x, value in zip(step["outputs"], outputs) if x["replaces"]}
    feeds["ids"] = outputs[0].argmax(-1, keepdim=True)
    made.append(feeds["ids"])
    logits.append(outputs[0])
assert not any(name.split(".")[0] == "semkv" for name in sys.modules)
save_file({"tokens": torch.cat(made, 1), "logits": torch.stack(logits, 1)}, folder / "made.safetensors")
"""


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


def ours(compiled: CompiledModel, state: State, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """The tokens [B, tokens] that follow greedily, and their logits [B, tokens, vocab]; the state goes on."""
    ids, made, logits = state.logits.argmax(-1, keepdim=True), [], []
    for _ in range(tokens):
        logits.append(compiled.extend(state, ids).view(len(ids), -1))
        ids = logits[-1].argmax(-1, keepdim=True)
        made.append(ids)
    return torch.cat(made, 1), torch.stack(logits, 1)


def in_onnxruntime(folder: Path, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """The same by stock onnxruntime, from `state.safetensors` in the folder."""
    import onnxruntime

    step = json.loads((folder / "step.json").read_text())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(folder / step["file"], options, providers=["CPUExecutionProvider"])
    held = load_file(folder / "state.safetensors")
    feeds = {x["name"]: held[x["name"]].numpy() for x in step["inputs"]}
    made, logits = [], []
    for _ in range(tokens):
        outputs = session.run([x["name"] for x in step["outputs"]], feeds)
        feeds |= {x["replaces"]: value for x, value in zip(step["outputs"], outputs) if x["replaces"]}
        feeds["ids"] = outputs[0].argmax(-1)[:, None]
        made.append(feeds["ids"])
        logits.append(outputs[0])
    return torch.from_numpy(numpy.concatenate(made, 1)), torch.from_numpy(numpy.stack(logits, 1))


def without_semkv(folder: Path, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """The same by an AOTInductor package, in a process in which semkv cannot be imported."""
    command = [sys.executable, "-I", "-c", AOTI_HOST, str(folder), str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder)
    assert done.returncode == 0, done.stderr
    made = load_file(folder / "made.safetensors")
    return made["tokens"], made["logits"]


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


def differences(compiled: CompiledModel, folder: Path, form: str, lengths: tuple[tuple[int, ...], ...]) -> list[str]:
    """Export, and compare `TOKENS` tokens of states of prompts of the lengths, of several batches, by one file: what is not ours, and
    operators that are not the standard's."""
    compiled.export(folder, format=form)
    unlike = []
    if form == "onnx":
        found = domains(folder / "step.onnx")
        print("domains", found)
        unlike += [] if found == {""} else [f"operators of {found}"]
    for several in lengths:
        state = reserved(compiled, several)
        compiled.export_state(state, folder / "state.safetensors")
        tokens, logits = in_onnxruntime(folder) if form == "onnx" else without_semkv(folder)
        expected, theirs = ours(compiled, state)
        equal, apart = int((tokens == expected).sum()), float((logits - theirs).abs().max())
        told = f"{form}, rows of {several}: {equal} of {expected.numel()} tokens equal, logits within {apart:.1e}"
        print(told)
        alike = torch.equal(tokens, expected) and torch.allclose(logits, theirs, rtol=1e-3, atol=1e-3)
        unlike += [] if alike else [told]
    return unlike


__all__ = [
    "BUDGETS",
    "TOKENS",
    "differences",
    "domains",
    "in_onnxruntime",
    "ours",
    "prompts",
    "reserved",
    "without_semkv",
]
