"""From a decoder to a program: `torch.export` of the stateless forward, unlifted onto the user's own tensors."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node

from semkv.capture.checks import accepts, check_model, declared_context, text_config
from semkv.capture.preserve import preserved
from semkv.errors import CaptureError
from semkv.ir.graph import BODY_INPUTS
from semkv.ir.program import Program

EXAMPLE_LENGTH = 37
"""Tokens of the example input: a prime that is no size of a usual model, so that no branch on divisibility is taken."""

LONGEST = 1 << 31
"""Bounds of a length from here on are none."""

PREFIX = "model."
"""Where `_Stateless` holds the user's model; names in the program are those of the user's model."""


class _Stateless(nn.Module):
    """The model as a function of ids and positions alone: no cache, no mask, logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.takes_positions = accepts(model, "position_ids")
        options = {"use_cache": False, "return_dict": True}
        self.options = {name: value for name, value in options.items() if accepts(model, name)}
        self.by_name = accepts(model, "input_ids")
        self.eval()

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        options: dict[str, Any] = dict(self.options)
        if self.takes_positions:
            options["position_ids"] = positions
        result = self.model(input_ids=input_ids, **options) if self.by_name else self.model(input_ids, **options)
        return _logits_of(result)


def _logits_of(result: Any) -> Tensor:
    """The logits in what a forward returned: a tensor, an object with `.logits`, or a tuple that begins with them."""
    logits = getattr(result, "logits", None)
    if logits is None and isinstance(result, dict):
        logits = result.get("logits")
    if logits is None:
        logits = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(logits, Tensor):
        raise CaptureError(
            f"the model returned {type(result).__name__} without logits; expected a tensor [B, T, vocab], an object "
            "with `.logits`, or a tuple that begins with them"
        )
    return logits


def capture(model: nn.Module, *, example_length: int = EXAMPLE_LENGTH, within_dynamo: bool = False) -> Program:
    """Export the stateless forward of `model` with dynamic batch and length, as a program at stage `captured`.

    The model is not changed; the program's parameters and buffers are the model's own tensors under their own names.

    Parameters
    ----------
    model: a decoder in evaluation mode: ids [B, T] int64 -> logits [B, T, vocab].
    example_length: tokens of the example that export traces; the program runs at any length.
    within_dynamo: whether Dynamo is compiling now. It must not run within itself, so export's strict mode, which runs it, is not tried.

    Raises
    ------
    InputError: no module, no parameters, or training mode.
    CaptureError: what `check_model` refuses, a forward that does not export, or one whose graph fixes the length.
    """
    check_model(model)
    wrapper = _Stateless(model)
    with preserved(model), torch.no_grad(), _quiet():
        exported, batched = _export(model, wrapper, example_length, (False,) if within_dynamo else (False, True))
    module = _unlift(exported, wrapper)
    vocab_size, dtype = _describe_model(model, module)
    note = f"capture: {type(model).__name__}, {sum(n.op == 'call_function' for n in module.graph.nodes)} operations, "
    note += f"length dynamic, batch {'dynamic' if batched else 'fixed at 1'}"
    note += ", positions given" if wrapper.takes_positions else ", positions made inside"
    return Program(
        stage="captured",
        body=module,
        head=None,
        sites=(),
        vocab_size=vocab_size,
        max_positions=_context(model, exported),
        dtype=dtype,
        batched=batched,
        notes=(note,),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Export warns about assigned attributes, which `preserved` restores, and logs every failed attempt."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _export(
    model: nn.Module, wrapper: _Stateless, length: int, modes: tuple[bool, ...]
) -> tuple[ExportedProgram, bool]:
    """The exported forward and whether its batch is dynamic; a batch of one where a larger one does not export."""
    device = next(model.parameters()).device
    failures: list[str] = []
    for rows in (2, 1):
        for strict in modes:
            ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
            positions = torch.arange(length, dtype=torch.int64, device=device).expand(rows, length).contiguous()
            axes = {0: Dim.AUTO, 1: Dim.AUTO} if rows > 1 else {1: Dim.AUTO}
            try:
                exported = torch.export.export(wrapper, (ids, positions), dynamic_shapes=(axes, axes), strict=strict)
                exported = _functional(exported)
            except CaptureError:
                raise
            except Exception as error:  # export raises whatever the model's Python raises
                failures.append(
                    f"batch {rows}, {'strict' if strict else 'lenient'}: {type(error).__name__}: {_first_line(error)}"
                )
                continue
            batch_free, length_free = _free_axes(exported)
            if not length_free:
                failures.append(f"batch {rows}: the graph fixes the length at {length}")
                continue
            if rows > 1 and not batch_free:
                failures.append(f"batch {rows}: the graph fixes the batch")
                break
            return exported, rows > 1
    listed = "\n  ".join(failures)
    raise CaptureError(
        f"torch.export cannot capture the forward of {type(model).__name__} with a dynamic length; its code branches "
        f"on values or sizes. Attempts:\n  {listed}"
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else "no message"


def _functional(exported: ExportedProgram) -> ExportedProgram:
    """Without operations that write to their arguments: values then have one meaning wherever they are read."""
    if any(_writes(node) for node in exported.graph.nodes):
        return exported.run_decompositions({})
    return exported


def _writes(node: Node) -> bool:
    """Whether the node mutates an argument; `detach_` changes no value."""
    target = node.target
    if target is torch.ops.aten.detach_.default:
        return False
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _free_axes(exported: ExportedProgram) -> tuple[bool, bool]:
    """Whether batch and length of the ids stayed symbols."""
    (ids, *_) = (node for node in exported.graph.nodes if node.op == "placeholder" and node.name == "input_ids")
    shape = ids.meta["val"].shape
    rows, length = (isinstance(size, torch.SymInt) and not size.node.expr.is_number for size in shape)
    return rows, length


def _context(model: nn.Module, exported: ExportedProgram) -> int | None:
    """Positions that the program covers: what the model declares, at most the longest sequence of the traced branch.

    Raises
    ------
    CaptureError: the traced branch is one for long sequences only.
    """
    lower, upper = 0, None
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name in BODY_INPUTS:
            expression = node.meta["val"].shape[1].node.expr
            bounds = exported.range_constraints.get(expression)
            if bounds is not None:
                lower = max(lower, int(bounds.lower))
                if bounds.upper < LONGEST:
                    upper = int(bounds.upper) if upper is None else min(upper, int(bounds.upper))
    if lower > 2:
        raise CaptureError(
            f"the forward of {type(model).__name__} takes another branch for sequences shorter than {lower} tokens; "
            "expected one computation for every length"
        )
    limits = [limit for limit in (declared_context(model), upper) if limit is not None]
    return min(limits) if limits else None


def _unlift(exported: ExportedProgram, wrapper: nn.Module) -> GraphModule:
    """A GraphModule that reads parameters, buffers and constants as attributes: the user's tensors and names."""
    root = nn.Module()
    graph = Graph()
    copied: dict[Node, Node] = {}
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            spec = specs[node.name]
            if spec.kind == InputKind.USER_INPUT:
                copied[node] = graph.placeholder(node.name)
            else:
                name = _attach(root, exported, wrapper, spec)
                copied[node] = graph.get_attr(name)
            copied[node].meta = dict(node.meta)
        elif node.op == "output":
            (logits,) = (
                value
                for value, spec in zip(node.args[0], exported.graph_signature.output_specs, strict=True)
                if spec.kind == OutputKind.USER_OUTPUT
            )
            graph.output(copied[logits])
        else:
            if node.op == "get_attr":
                setattr(root, str(node.target), getattr(exported.graph_module, str(node.target)))
            copied[node] = graph.node_copy(node, copied.__getitem__)
            _strip_wrapper(copied[node])
    module = GraphModule(root, graph, class_name="Body")
    graph.lint()
    return module


def _attach(root: nn.Module, exported: ExportedProgram, wrapper: nn.Module, spec: Any) -> str:
    """Register the tensor that a lifted input stands for under its name in the user's model; return that name."""
    target = spec.target
    if spec.kind == InputKind.PARAMETER:
        tensor: Tensor = wrapper.get_parameter(target)
    elif spec.kind == InputKind.BUFFER:
        tensor = wrapper.get_buffer(target)
    else:
        tensor = exported.constants[target]
        if not isinstance(tensor, Tensor):
            raise CaptureError(f"the forward reads {target}, a {type(tensor).__name__}; expected tensors only")
    name = target.removeprefix(PREFIX)
    owner = root
    *path, leaf = name.split(".")
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = owner._modules[part]
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(leaf, tensor)
    else:
        owner.register_buffer(leaf, tensor)
    return name


def _strip_wrapper(node: Node) -> None:
    """Module paths in the user's model: `layers.0.attn`, not `model.layers.0.attn` of the wrapper."""
    stack = node.meta.get("nn_module_stack")
    if stack:
        node.meta["nn_module_stack"] = {
            key: (path.removeprefix(PREFIX) if path != PREFIX.rstrip(".") else "", kind)
            for key, (path, kind) in stack.items()
            if path
        }


def _describe_model(model: nn.Module, module: GraphModule) -> tuple[int, torch.dtype]:
    """Vocabulary size and the dtype of the parameters."""
    logits = module.graph.output_node().args[0]
    shape = logits.meta["val"].shape
    if len(shape) != 3 or not isinstance(shape[1], torch.SymInt):
        raise CaptureError(
            f"the model returns a tensor of shape {tuple(shape)}; expected logits [B, T, vocab] for every token"
        )
    declared = getattr(text_config(model), "vocab_size", None)
    vocab_size = declared if isinstance(declared, int) and declared > 0 else int(shape[2])
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return vocab_size, dtype
