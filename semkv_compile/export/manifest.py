"""`step.json`: what a host needs to know of an exported step, and what `rows_of` needs to fit states to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from semkv.artifact.fingerprint import program_fingerprint
from semkv.errors import ArtifactError
from semkv.export.layout import Field, Layout, StepPart
from semkv.io.files import dump_json, read_json
from semkv.methods.speculation import Speculation
from semkv.runtime.decode.layer_step import NUMBERS
from semkv.runtime.placement import Placement

FORMAT, VERSION, NAME = "semkv-step", 1, "step.json"
NEXT = "next."
"""Before the name of the input that an output replaces."""

SIZES = {
    "rows": "sequences of the batch, of any lengths",
    "capacity": "places for the newest tokens; a row's next token goes to place `at`, which must be less",
    "kept": "exact tokens that stay, of the row with the most",
    "units": "folded units, of the row with the most",
    "slots": "tokens that may be unfolded at once, of the row with the most",
    "waiting": "folded tokens, of the row with the most",
}
"""What a size is, by the end of its symbol."""

SAYS = {
    "at": "the place among the newest tokens that the next one is written to; 1 more after each step",
    "count": "folded units that the row has; the same in every step",
    "room": "what may be unfolded at once, in tokens, or in units where all have one token; the same in every step",
    "start": "where the first folded token waits; the same in every step",
    "shift": "what the position of a folded token is above its place; the same in every step",
}
"""The rows of `numbers`."""

LOOP = [
    "Begin with the tensors of a state file (compiled.export_state), whose names are those of the inputs.",
    "Each step: run the file on all inputs; every output with `replaces` becomes that input; all other inputs stay as they are.",
    "The next `ids` are chosen from `logits`, by the largest one for example.",
    "A state file says for how many steps there is room (metadata `steps`): after those, go on from a new state.",
    "Rows of several states can share a batch: pad each tensor along its sizes with its `fill`.",
]


def describe(placement: Placement, layout: Layout, file: str, kind: str, **more: Any) -> dict[str, Any]:
    """What `step.json` holds."""
    program = placement.program
    rows: int | str = "rows" if program.batched else 1
    numbers = [len(layout.parts), len(NUMBERS), rows]
    first = [
        _tensor("ids", torch.int64, [rows, 1], "the token that each row reads"),
        _tensor(
            "positions",
            torch.int64,
            [rows, 1],
            "its position: how many tokens the row has read; 1 more after each step",
        ),
        _tensor("numbers", torch.int64, numbers, "of each part of a layer and row, what `numbers` says"),
    ]
    state = [_tensor(x.name, x.dtype, list(x.shape), x.kind) | {"fill": x.fill} for x in layout.fields.values()]
    inputs = [*first, *state]
    logits = _tensor("logits", program.dtype, [rows, program.vocab_size], "what follows, by token") | {"replaces": None}
    replaced = ("positions", "numbers", *layout.written)
    known = {x["name"]: x for x in inputs}
    outputs = [logits] + [
        {"name": f"{NEXT}{name}", **{key: known[name][key] for key in ("dtype", "shape")}, "replaces": name}
        for name in replaced
    ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "file": file,
        "kind": kind,
        **more,
        "model": {
            "vocab_size": program.vocab_size,
            "max_positions": program.max_positions,
            "dtype": _dtype(program.dtype),
            "layers": len(program.sites),
            "program": program_fingerprint(program),
        },
        "method": placement.method,
        "budget": placement.budget.value,
        "sizes": {name: _size(name) for name in layout.symbols()},
        "inputs": inputs,
        "outputs": outputs,
        "numbers": {name: SAYS[name] for name in NUMBERS},
        "parts": [{**vars(part), "local": list(part.local)} for part in layout.parts],
        "loop": LOOP,
    }


def write_manifest(folder: Path, told: dict[str, Any]) -> None:
    """Write `step.json` into a folder."""
    (folder / NAME).write_bytes(dump_json(told, folder / NAME, error=ArtifactError))


def read_layout(placement: Placement, folder: Path) -> Layout:
    """The layout of the step in `folder`, without its turns: what rows have to be brought to.

    Raises
    ------
    ArtifactError: no step of this version, or one of another model, method or budget.
    """
    path = folder / NAME
    told = read_json(path, error=ArtifactError)
    if not isinstance(told, dict) or (told.get("format"), told.get("version")) != (FORMAT, VERSION):
        raise ArtifactError(f"{path}: not a step of version {VERSION}; export it again")
    mine = (placement.method, placement.budget.value, program_fingerprint(placement.program))
    try:
        theirs = (told["method"], told["budget"], told["model"]["program"])
        if theirs != mine:
            raise ArtifactError(
                f"{path}: a step of {theirs[0]!r} with budget {theirs[1]} of program {theirs[2][:12]}; this model is {mine[0]!r} with "
                f"budget {mine[1]}, program {mine[2][:12]}: export this one"
            )
        parts = tuple(StepPart(**{**part, "local": tuple(part["local"])}) for part in told["parts"])
        written = {x["replaces"] for x in told["outputs"]}
        fields = {
            x["name"]: Field(
                x["name"], getattr(torch, x["dtype"]), tuple(x["shape"]), x["says"], x["name"] in written, x["fill"]
            )
            for x in told["inputs"]
            if "fill" in x
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path}: damaged ({error}); export the step again") from error
    before = placement.plan.before
    return Layout(placement, parts, (), fields, before if isinstance(before, Speculation) else None)


def _tensor(name: str, dtype: torch.dtype, shape: list[int | str], says: str) -> dict[str, Any]:
    return {"name": name, "dtype": _dtype(dtype), "shape": shape, "says": says}


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(name: str) -> str:
    if name == "retrieval_capacity":
        return "places for the retrieval head's keys, by position, which must be less"
    return SIZES[name.rsplit("_", 1)[-1]]


__all__ = ["LOOP", "NAME", "NEXT", "describe", "read_layout", "write_manifest"]
