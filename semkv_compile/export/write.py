"""Write the decode step of a compiled model, and states, as files that run without semkv."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from semkv.artifact.recurrences import bodies_of, body_values
from semkv.errors import BudgetError, ConfigError, InputError, StateError
from semkv.export.layout import Layout, check_plan
from semkv.export.manifest import NEXT, describe, read_layout, write_manifest
from semkv.export.module import StepModule, dynamic_shapes, example_inputs
from semkv.export.rows import rows_of
from semkv.io.files import replace_file, replace_folder
from semkv.ir.program import Program
from semkv.kernels.cpp import MISSING, compiler
from semkv.runtime.decode.step_graph import TRACING
from semkv.runtime.modes import undisturbed
from semkv.runtime.placement import Placement
from semkv.runtime.state import State

Prefill = Callable[[Tensor], State]
"""ids int64 [B, n] -> their state."""
Format = Literal["onnx", "aoti"]
FORMATS: tuple[str, ...] = get_args(Format)
OPSET = 20
"""Of ONNX's standard operators."""
EXTRA = ("onnx", "onnxscript")
LONGEST_EXAMPLE = 16384


def check_tools(form: str) -> None:
    """Raise `ConfigError` for an unknown format, or one whose packages or compiler are missing."""
    if form not in FORMATS:
        raise ConfigError(f"format {form!r}: expected one of {', '.join(FORMATS)}")
    missing = [name for name in EXTRA if find_spec(name) is None]
    if form == "onnx" and missing:
        raise ConfigError(
            f"format 'onnx' needs the package {missing[0]}, which is not installed: pip install 'semkv[onnx]'"
        )
    if form == "aoti" and compiler() is None:
        raise ConfigError(f"format 'aoti': {MISSING}; install one, or use format='onnx'")


def check_path(folder: Path) -> None:
    """Raise `ConfigError` where something is already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: there is something already; give a path that does not exist, or an empty folder")


def check_recurrences(program: Program) -> None:
    """Raise `ConfigError` for a model with recurrent states, which exported steps have no inputs for; `ArtifactError` for one of which a
    module runs as its own code."""
    body_values(bodies_of(program))
    names = [site.name for site in program.recurrences if site.states]
    if names:
        more = f", as {len(names) - 1} more modules do" if len(names) > 1 else ""
        raise ConfigError(
            f"{names[0]} goes on from states of its own{more}: an exported step "
            "carries keys and values only; save the compiled model with save(path), which semkv.load runs without the modelling code"
        )


def check_chunks(program: Program) -> None:
    """Raise `ConfigError` for attention in chunks, which exported steps do not mask."""
    chunks = [site for site in program.sites if site.chunk]
    if chunks:
        raise ConfigError(
            f"{chunks[0].name} attends within chunks of {chunks[0].chunk} tokens, which no exported step has; save the compiled model with "
            "save(path), which semkv.load runs without the modelling code"
        )


@undisturbed
def export_step(
    placement: Placement,
    prefill: Prefill,
    path: str | os.PathLike[str],
    form: str = "onnx",
    *,
    example: State | None = None,
) -> Path:
    """See `CompiledModel.export`; `prefill` makes the example where none is given."""
    folder = Path(path)
    check_tools(form)
    check_path(folder)
    check_recurrences(placement.program)
    check_chunks(placement.program)
    check_plan(placement)
    if example is not None and example.placement is not placement:
        raise ConfigError("example: a state of another compiled model; prefill one with this model")
    layout = Layout.of(placement, example_state(placement, prefill) if example is None else example)
    with TRACING:
        step = torch.export.export(
            StepModule(layout).eval(), example_inputs(layout), dynamic_shapes=dynamic_shapes(layout), strict=False
        )
        with replace_folder(folder) as made:
            told: dict[str, Any] = {"torch": str(torch.__version__)}
            if form == "onnx":
                _write_onnx(step, layout, made / "step.onnx")
                told["opset"] = OPSET
            else:
                _write_package(step, made / "step.pt2")
            write_manifest(
                made, describe(placement, layout, "step.onnx" if form == "onnx" else "step.pt2", form, **told)
            )
    return folder


def _write_onnx(step: torch.export.ExportedProgram, layout: Layout, file: Path) -> None:
    """The graph, with the weights beside it in `step.onnx.data`."""
    names = ["ids", "positions", "numbers", *layout.fields]
    outputs = ["logits", *(f"{NEXT}{name}" for name in ("positions", "numbers", *layout.written))]
    made = torch.onnx.export(
        step, dynamo=True, verbose=False, optimize=False, opset_version=OPSET, input_names=names, output_names=outputs
    )
    assert made is not None
    name_sizes(made.model, layout)
    made.save(file, external_data=True)


def name_sizes(model: Any, layout: Layout) -> None:
    """Give the sizes of an ONNX model that may differ the symbols of the layout."""
    import onnx_ir as ir

    shapes: dict[str, Sequence[int | str]] = {name: field.shape for name, field in layout.fields.items()}
    shapes |= {"ids": ("rows", 1)}
    symbols: dict[str, str] = {}
    for value in model.graph.inputs:
        for told, dim in zip(shapes.get(value.name, ()), value.shape or ()):
            if isinstance(told, str) and not isinstance(dim, int) and "+" not in told:
                symbols[str(dim.value)] = told

    def named(dim: Any) -> Any:
        if isinstance(dim, int) or dim.value is None:
            return dim
        words = str(dim.value).replace("+", " + ").split()
        return ir.SymbolicDim(" ".join(symbols.get(word, word) for word in words))

    values = [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([named(dim) for dim in value.shape])


def _write_package(step: torch.export.ExportedProgram, file: Path) -> None:
    from torch._inductor import aoti_compile_and_package

    # Numbers are rounded where the step rounds them: codes of 8 bits are those of a scale in float16.
    aoti_compile_and_package(step, package_path=str(file), inductor_configs={"emulate_precision_casts": True})


def example_state(placement: Placement, prefill: Prefill) -> State:
    """A state of a prompt of random tokens, long enough for the method to have something to do in every layer, or, where a layer's share
    of the budget holds all tokens whatever their number, in all others.

    Raises
    ------
    ConfigError: no such prompt was found.
    """
    budget, most = placement.budget, placement.program.max_positions or LONGEST_EXAMPLE
    share = budget.value if isinstance(budget.value, float) else 1.0
    tokens = max(256, 2 * budget.floor + 64, int(1.5 * placement.minimum_tokens / share))
    if isinstance(budget.value, int):
        tokens = max(tokens, 2 * budget.value + 64)
    failure: Exception | None = None
    state: State | None = None
    idle, before = list[int](), list[int]()
    for length in dict.fromkeys(min(tokens << doubled, most - 1) for doubled in range(4)):
        generator = torch.Generator(device="cpu").manual_seed(0)
        size = (1, length)
        ids = torch.randint(placement.program.vocab_size, size, generator=generator, dtype=torch.int64, device="cpu")
        try:
            state = prefill(ids)
        except (BudgetError, InputError) as error:
            failure = error
            continue
        folding = [memory for row in state.rows for memory in row.budgeted() if memory.unfolds]
        idle, before = [number for number, memory in enumerate(folding) if not memory.reads_units], idle
        if not idle:
            return state
    if state is not None and idle == before and len(idle) < len(folding):  # as many tokens again made no difference
        return state
    raise ConfigError(
        f"no prompt of random tokens, from {min(tokens, most - 1)} on, has folded tokens in every layer with {placement.method!r} "
        f"and budget {budget.value}: give example=state, a state whose form the step is for"
        + (f" ({failure})" if failure else "")
    )


@undisturbed
def export_state(
    placement: Placement, state: State, path: str | os.PathLike[str], step: str | os.PathLike[str] | None = None
) -> Path:
    """See `CompiledModel.export_state`."""
    from safetensors.torch import save_file

    if any(row.turned for row in state.rows):
        raise StateError(
            "an exported step counts rotary positions by tokens, and this state has read images, behind which they are "
            "others: go on with compiled.generate"
        )
    file = Path(path)
    layout = read_layout(placement, file.parent if step is None else Path(step))
    if state.placement is not placement:
        raise ConfigError("a state of another compiled model: prefill it with this one")
    with state.in_use():
        rows = rows_of(layout, state)
        tensors = {name: x.contiguous() for name, x in rows.inputs().items()} | {
            "logits": state.logits.cpu().contiguous()
        }
        with replace_file(file) as temporary:
            save_file(
                tensors,
                temporary,
                metadata={"format": "semkv-step-state", "version": "1", "steps": str(state.reserved)},
            )
    return file


__all__ = ["FORMATS", "check_path", "check_tools", "example_state", "export_state", "export_step"]
