"""From a decoder to a program: `torch.export` of the stateless forward, unlifted onto the user's own tensors."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, default_decompositions
from torch.export.graph_signature import InputKind, OutputKind
from torch.func import functional_call
from torch.fx import Graph, GraphModule, Node

from semkv.capture.agreement import Agreement
from semkv.capture.checks import accepts, check_model, declared_context, text_config
from semkv.capture.embeddings import mark_embeddings, takes_more
from semkv.capture.guards import Guards, lengths_up_to
from semkv.capture.inner_weights import InnerWeights
from semkv.capture.inputs import check_inputs, check_runs
from semkv.capture.local_modules import candidates
from semkv.capture.preserve import preserved
from semkv.capture.recurrence import Recurrences, find_recurrences, with_local
from semkv.capture.same_graph import same_operations
from semkv.errors import CaptureError
from semkv.ir.program import Program
from semkv.ir.recurrence import RecurrentSite
from semkv.ir.seams import Seams

EXAMPLE_LENGTH = 37
"""Tokens of the example input: a prime that is no size of a usual model, so that no branch on divisibility is taken."""

MORE_EXPORTS = 4
"""Exports at other lengths that are tried to find out whether a guard decided anything."""

LEAST_CONTEXT = 64
"""Tokens below which a context is none, where the model declares none."""

LEAST_DECLARED = 512
"""Tokens below which what remains of a declared context is no use."""

PREFIX = "model."
"""Where `_Stateless` holds the user's model; names in the program are those of the user's model."""

INNER = "inner.tensors."
"""Where it holds what is inside weights that wrap others."""

OWN = ("aten", "prims")
"""Namespaces of the operators that a graph keeps as they are."""

UNCHECKED = (torch.ops.aten._weight_norm.default, torch.ops.aten._weight_norm_interface.default)
"""But these, which trust their arguments, so that no artifact may hold them."""


class _Stateless(nn.Module):
    """The model as a function of ids and positions alone: no cache, no mask, logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.inner = InnerWeights(model)
        self.takes_positions = accepts(model, "position_ids")
        options = {"use_cache": False, "return_dict": True}
        self.options = {name: value for name, value in options.items() if accepts(model, name)}
        self.recurrences = Recurrences()
        self.by_name = accepts(model, "input_ids")
        self.eval()

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        options: dict[str, Any] = dict(self.options)
        if self.takes_positions:
            options["position_ids"] = positions
        given: tuple[Tensor, ...] = (input_ids,)
        if self.by_name:
            given, options["input_ids"] = (), input_ids
        if self.inner.wrappers:
            return _logits_of(functional_call(self.model, self.inner.rebuilt(), given, options))
        return _logits_of(self.model(*given, **options))


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
    CaptureError: what `check_model` and `check_inputs` refuse, a forward that does not export, or one whose graph is not the
        model's for every length up to a context.
    """
    check_model(model)
    check_inputs(model)
    wrapper = _Stateless(model)
    wrapper.recurrences = find_recurrences(model)
    with preserved(model), torch.no_grad(), _quiet():
        attempt, context, limits = _export(model, wrapper, example_length, (False,) if within_dynamo else (False, True))
    batched = attempt.rows > 1
    module, recurrences = _unlift(attempt.exported, wrapper)
    mark_embeddings(model, module)
    vocab_size, dtype = _describe_model(model, module)
    with preserved(model), torch.no_grad(), _quiet():
        recurrent = any(site.states for site in recurrences)
        agreement = Agreement(type(model).__name__, wrapper, module, vocab_size, recurrent=recurrent)
        if wrapper.takes_positions:
            context, reason = agreement.reach(context)
            limits = [*limits, reason] if reason else limits
        agreed = agreement.check(context, example_length + 4, batched=batched, far=wrapper.takes_positions)
    note = f"capture: {type(model).__name__}, {sum(n.op == 'call_function' for n in module.graph.nodes)} operations, "
    note += f"length dynamic, batch {'dynamic' if batched else 'fixed at 1'}"
    note += ", positions given" if wrapper.takes_positions else ", positions made inside"
    note += f"; {agreed}"
    for site in recurrences:
        note += f"; {'recurrent' if site.states else 'opaque'} {site.name}: {site.reason}"
    if limits:
        note += f"; context {context}, {declared_context(model) or 'none'} declared: {'; '.join(limits)}"
    return Program(
        stage="captured",
        body=module,
        head=None,
        sites=(),
        vocab_size=vocab_size,
        max_positions=context,
        dtype=dtype,
        batched=batched,
        recurrences=recurrences,
        seams=Seams(reads_more=takes_more(model)),
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


@dataclass(frozen=True)
class _Attempt:
    """An export of the forward, and how it was made.

    Attributes
    ----------
    exported: the program, functional.
    rows: of the example; 1 where the batch is not dynamic.
    strict: whether the forward's bytecode was traced.
    """

    exported: ExportedProgram
    rows: int
    strict: bool


def _export(
    model: nn.Module, wrapper: _Stateless, length: int, modes: tuple[bool, ...]
) -> tuple[_Attempt, int | None, list[str]]:
    """The exported forward, its context, and what limits that below what the model declares.

    A batch of one where a larger one does not export.
    """
    failures: list[str] = []
    for rows in (2, 1):
        for strict in modes:
            try:
                exported = _trace_past_branches(model, wrapper, rows, length, strict)
            except CaptureError:
                raise
            except Exception as error:  # export raises whatever the model's Python raises
                failures.append(
                    f"batch {rows}, {'strict' if strict else 'lenient'}: {type(error).__name__}{_place_of(error, model)}: "
                    f"{_first_line(error)}{_noted(error)}"
                )
                continue
            batch_free, length_free = _free_axes(exported)
            if not length_free:
                failures.append(f"batch {rows}: the graph fixes the length at {length}")
                continue
            if rows > 1 and not batch_free:
                failures.append(f"batch {rows}: the graph fixes the batch")
                break
            attempt = _Attempt(exported, rows, strict)
            try:
                context, limits = _served_lengths(model, wrapper, attempt)
            except _BatchError as error:
                failures.append(f"batch {rows}: {error}")
                break
            return attempt, context, limits
    with preserved(model):
        check_runs(model, wrapper, length)
    listed = "\n  ".join(failures)
    raise CaptureError(
        f"torch.export cannot capture the forward of {type(model).__name__} with a dynamic length; its code branches "
        f"on values or sizes. Attempts:\n  {listed}"
    )


def _trace(wrapper: _Stateless, rows: int, length: int, strict: bool) -> ExportedProgram:
    device = next(wrapper.parameters()).device
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
    positions = torch.arange(length, dtype=torch.int64, device=device).expand(rows, length).contiguous()
    axes = {0: Dim.AUTO, 1: Dim.AUTO} if rows > 1 else {1: Dim.AUTO}
    with wrapper.recurrences.opaque(), _as_it_is_raised(wrapper, strict):
        exported = torch.export.export(wrapper, (ids, positions), dynamic_shapes=(axes, axes), strict=strict)
    return _functional(exported)


class _RaisedError(Exception):
    """What the model's own code raised while it was traced: export prints the whole graph beside errors of some texts."""

    def __init__(self, raised: Exception) -> None:
        self.raised = raised


@contextmanager
def _as_it_is_raised(wrapper: _Stateless, strict: bool) -> Iterator[None]:
    """While entered, what the model raises passes through export as it is; not where the forward's bytecode is traced."""

    def forward(input_ids: Tensor, positions: Tensor) -> Tensor:
        try:
            return _Stateless.forward(wrapper, input_ids, positions)
        except Exception as error:  # the model's own code, which may raise anything
            raise _RaisedError(error) from error

    if strict:
        yield
        return
    vars(wrapper)["forward"] = forward
    try:
        yield
    except _RaisedError as error:
        raise error.raised from None
    finally:
        del vars(wrapper)["forward"]


def _trace_past_branches(
    model: nn.Module, wrapper: _Stateless, rows: int, length: int, strict: bool
) -> ExportedProgram:
    """`_trace`; where it fails in a module that treats each token by itself, that module becomes one node, and it is traced again.

    Raises what tracing raises, with what is known of the modules that it fails in.
    """
    while True:
        try:
            return _trace(wrapper, rows, length, strict)
        except CaptureError:
            raise
        except Exception as error:  # export raises whatever the model's Python raises
            reasons = []
            for module in candidates(error, model):
                try:
                    wrapper.recurrences = with_local(wrapper.recurrences, model, wrapper, module)
                    break
                except CaptureError as reason:
                    reasons.append(str(reason))
            else:
                if reasons:
                    error.add_note(reasons[0])
                raise


def _place_of(error: Exception, model: nn.Module) -> str:
    """` in layers.0.mlp (LlamaMLP)`: the innermost module of the model that was running; nothing where none was."""
    paths = {id(module): path for path, module in model.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        running = trace.tb_frame.f_locals.get("self")
        if paths.get(id(running)):
            found = f" in {paths[id(running)]} ({type(running).__name__})"
        trace = trace.tb_next
    return found


def _noted(error: Exception) -> str:
    return "".join(f"; {note}" for note in getattr(error, "__notes__", ()))


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else "no message"


def _functional(exported: ExportedProgram) -> ExportedProgram:
    """Without operations that write to their arguments: values then have one meaning wherever they are read. And without those of
    other libraries that are made of ATen's, which stand in their place."""
    replaced = {node.target for node in exported.graph.nodes if _is_replaced(node)}
    known = default_decompositions() if replaced else {}
    composed = {target: known[target] for target in replaced if target in known}
    if composed:
        composed |= {target: known[target] for target in UNCHECKED}  # one is made of the other
    if composed or any(_writes(node) for node in exported.graph.nodes):
        return exported.run_decompositions(composed)
    return exported


def _is_replaced(node: Node) -> bool:
    """Whether the operator that the node calls is another library's, or unchecked."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (target.namespace not in OWN or target in UNCHECKED)


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


class _BatchError(Exception):
    """The graph is not the model's for every number of rows."""


def _served_lengths(model: nn.Module, wrapper: _Stateless, attempt: _Attempt) -> tuple[int | None, list[str]]:
    """The context that the graph serves and, where it is less than the model declares, why.

    A guard that does not hold at some length may have decided nothing: the model is exported again there, and where the
    operations are the same, so are the lengths that the second export's guards hold for.

    Raises
    ------
    CaptureError: the graph is not the model's for every length up to some bound, or that bound is no context.
    """
    guards, declared = Guards(attempt.exported), declared_context(model)
    lengths = lengths_up_to(declared)
    covered = guards.holds(attempt.rows, lengths)
    if attempt.rows > 1 and (breaker := guards.row_breaker(attempt.rows, lengths)):
        raise _BatchError(f"the graph assumes {breaker[0]}, not so for {breaker[1]} rows")
    for _ in range(MORE_EXPORTS):
        if covered.all():
            return declared, []
        length = int(lengths[np.argmin(covered)])
        other = _same_at(wrapper, attempt, length)
        if other is None:
            break
        covered |= Guards(other).holds(attempt.rows, lengths) | (lengths == length)
    if covered.all():
        return declared, []
    first = int(np.argmin(covered))
    length, broken = int(lengths[first]), guards.broken(attempt.rows, int(lengths[first]))
    context = int(lengths[first - 1]) if first else 0
    useful = LEAST_CONTEXT if declared is None else min(declared, LEAST_DECLARED)
    if context < useful or bool(covered[first:].any()):
        raise CaptureError(
            f"the forward of {type(model).__name__} is not one computation for every length: export took a branch where "
            f"{broken}, which does not hold at {length} tokens. Write it so that sizes follow the input, without Python "
            "branches and loops over the number of tokens"
        )
    return context, [f"export took a branch where {broken}, which does not hold at {length} tokens"]


def _same_at(wrapper: _Stateless, attempt: _Attempt, length: int) -> ExportedProgram | None:
    """The forward exported at `length`; None where it is not the same operations there, or does not export."""
    try:
        other = _trace(wrapper, attempt.rows, length, attempt.strict)
    except Exception:  # whatever the model's Python raises at that length
        return None
    return other if same_operations(attempt.exported, other, attempt.rows, length) else None


def _unlift(exported: ExportedProgram, wrapper: _Stateless) -> tuple[GraphModule, tuple[RecurrentSite, ...]]:
    """A GraphModule that reads parameters, buffers and constants as attributes: the user's tensors and names. And its modules that are one
    node each."""
    root = nn.Module()
    graph = Graph()
    copied: dict[Node, Node] = {}
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            spec = specs[node.name]
            if spec.kind == InputKind.USER_INPUT:
                copied[node] = graph.placeholder(node.name)
            elif wrapper.inner.wrappers and not node.users:
                continue  # a weight that wraps those which are read
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
    recurrences = wrapper.recurrences.put_into(module, lambda name, tensor: _hold(module, name, tensor))
    graph.lint()
    module.recompile()
    return module, recurrences


def _attach(root: nn.Module, exported: ExportedProgram, wrapper: _Stateless, spec: Any) -> str:
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
    if target.startswith(INNER):
        name = wrapper.inner.paths[int(target.removeprefix(INNER))]
    _hold(root, name, tensor)
    return name


def _hold(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Register a tensor of the user's model under its name."""
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
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
    # Numbers of one byte are a form that weights are kept in, not one that attention computes in.
    return vocab_size, next((dtype for dtype in dtypes if dtype.itemsize > 1), logits.meta["val"].dtype)
