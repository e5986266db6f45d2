"""The graph spec of each stage: which nodes are legal, and what must hold between graphs and sites.

Checked on the *result* of every pass. A violation is a defect of the pass, so it raises `SpecError`, never
`CaptureError`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from semkv.errors import SpecError
from semkv.ir import memory
from semkv.ir.defaults import reads_default
from semkv.ir.graph import BODY_INPUTS, attention_nodes, attribute, describe, placeholders, shape_of
from semkv.ir.ops import attention, linear, mixed_attention
from semkv.ir.program import Program, Stage
from semkv.ir.recurrence import Pieces, recur
from semkv.ir.site import AttentionSite

STAGES: tuple[Stage, ...] = ("captured", "found", "annotated", "lowered")
LOWERED = ("prefill", "extend", "decode")

PLAIN_FUNCTIONS = frozenset(
    getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "and_", "or_", "not_", "getitem")
) | {
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
    torch.sym_max,
    torch.sym_min,
    torch.sym_not,
    torch.sym_float,
    torch.sym_int,
    torch.sym_ite,
    torch.sym_sum,
    min,
    max,
}
"""Python functions on symbolic sizes that any stage may hold."""

MEMORY_FUNCTIONS = frozenset(memory.GRAPH_FUNCTIONS.values())
FORBIDDEN_NAMES = ("aten::_assert", "aten::sym_constrain_range")
"""Guards, which canonicalise removes: after it none may come back."""


def check(program: Program) -> None:
    """Raise `SpecError` when the program breaks the spec of its stage; the message lists every violation."""
    if program.stage not in STAGES:
        raise SpecError(f"stage {program.stage!r} is not one of {', '.join(STAGES)}")
    problems = list(_CHECKS[program.stage](program))
    if problems:
        listed = "\n  ".join(problems)
        raise SpecError(f"the program breaks the spec of stage {program.stage!r}:\n  {listed}")


def _graph_problems(
    module: GraphModule, label: str, inputs: tuple[str, ...], allowed: frozenset[Callable]
) -> list[str]:
    """Violations that any graph of any stage can have."""
    problems = []
    found = tuple(placeholders(module.graph))
    if found != inputs:
        problems.append(f"{label}: placeholders are {found}, expected {inputs}")
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op == "get_attr":
            try:
                value = attribute(module, str(node.target))
            except AttributeError:
                problems.append(f"{label}: {describe(node)} reads {node.target!r}, which the module does not have")
                continue
            if not isinstance(value, (torch.Tensor, GraphModule, Pieces)):
                problems.append(f"{label}: {describe(node)} is a {type(value).__name__}, expected a tensor")
        elif node.op != "call_function":
            problems.append(f"{label}: {describe(node)} is a {node.op} node; expected call_function or get_attr")
        elif not _legal_function(node, allowed):
            problems.append(
                f"{label}: {describe(node)} is not legal here; expected ATen, size arithmetic or semkv operators"
            )
    return problems


def _legal_function(node: Node, allowed: frozenset[Callable]) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace != "semkv" or target in allowed
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    return target in PLAIN_FUNCTIONS or target in allowed


def _captured(program: Program) -> list[str]:
    problems = _graph_problems(program.body, "body", BODY_INPUTS, frozenset({recur}))
    problems += _recurrences(program, program.body, "body")
    if program.sites:
        problems.append(f"{len(program.sites)} sites before find_attention has run; expected none")
    return problems


def _found(program: Program) -> list[str]:
    problems = _graph_problems(program.body, "body", BODY_INPUTS, frozenset({attention, recur}))
    problems += _recurrences(program, program.body, "body")
    problems += _no_guards(program.body, "body") + _no_defaults(program.body, "body")
    problems += _sites_are_numbered(program.sites)
    nodes = attention_nodes(program.body.graph)
    indices = [node.kwargs.get("site") for node in nodes]
    expected = [site.index for site in program.sites]
    if indices != expected:
        problems.append(
            f"body: semkv::attention nodes have sites {indices}, expected {expected}: one node per site, in order"
        )
        return problems
    for node, site in zip(nodes, program.sites):
        problems += _node_matches_site(node, site)
    if program.head is not None:
        # The head of a program that was lowered once, and is lowered anew, has the other operator already.
        problems += _graph_problems(program.head, "head", ("hidden",), frozenset({linear}))
        problems += _no_defaults(program.head, "head")
    return problems


def _annotated(program: Program) -> list[str]:
    problems = _found(program)
    if program.head is None:
        problems.append("head: missing; surprisal_head must run before a program is annotated")
    share = 0.0
    for site in program.sites:
        if not site.reason:
            problems.append(f"site {site.index} ({site.name}): no reason for its treatment {site.treatment!r}")
        if site.treatment != "method" and site.budget_share != 0.0:
            problems.append(
                f"site {site.index}: treatment {site.treatment!r} with budget share {site.budget_share}, expected 0"
            )
        if site.roles and len(site.roles) != site.kv_heads:
            problems.append(f"site {site.index}: {len(site.roles)} roles for {site.kv_heads} KV heads")
    counted = [site for site in program.stores if site.treatment == "method"]
    share = sum(site.budget_share for site in counted)
    if counted and abs(share - 1.0) > 1e-6:
        problems.append(f"budget shares of the {len(counted)} method stores sum to {share:.6f}, expected 1")
    return problems


def _lowered(program: Program) -> list[str]:
    problems = _annotated(program)
    for label in LOWERED:
        module = getattr(program, label)
        if module is None:
            problems.append(f"{label}: missing at stage lowered")
            continue
        problems += _graph_problems(
            module, label, (*BODY_INPUTS, "memory"), MEMORY_FUNCTIONS | {mixed_attention, linear, recur}
        )
        problems += _no_guards(module, label) + _no_defaults(module, label)
        problems += _recurrences(program, module, label, _states_of(program, label))
        writer = memory.record if label == "prefill" else memory.entries
        written = [node.args[1] for node in module.graph.nodes if node.target is writer]
        expected = [site.index for site in program.sites]
        if written != expected:
            problems.append(f"{label}: {writer.__name__} is called for sites {written}, expected {expected}")
        other = memory.entries if label == "prefill" else memory.record
        if any(node.target is other for node in module.graph.nodes):
            problems.append(f"{label}: calls {other.__name__}, expected only {writer.__name__}")
        if label == "decode" and any(node.target in (memory.embedded, memory.entering) for node in module.graph.nodes):
            problems.append("decode: asks what a token is besides its id; a token that was generated is nothing else")
        reads = sum(node.target == mixed_attention for node in module.graph.nodes)
        if reads != len(expected):
            problems.append(f"{label}: {reads} semkv::mixed_attention nodes for {len(expected)} sites")
        problems += _shares_parameters(program.body, module, label)
    if program.selector is not None:
        problems += _selector(program, program.selector)
    return problems


Calls = dict[Callable, tuple[int, ...]]
"""The numbers of the recurrent sites that functions are called for."""


def _states_of(program: Program, label: str) -> Calls:
    """What a lowered graph asks for the recurrent sites."""
    alone = tuple(site.index for site in program.recurrences if not site.states)
    fixed, choosing = (tuple(site.index for site in each) for each in (program.stateful, program.choosers))
    if label != "decode":
        return {memory.advance: tuple(sorted((*fixed, *choosing))), recur: alone}
    return {memory.read_states: fixed, memory.write_states: fixed, memory.advance: choosing, recur: alone}


def _recurrences(program: Program, module: GraphModule, label: str, calls: Calls | None = None) -> list[str]:
    """Each recurrent site is there once, in order: `calls`, by default `recur` for all."""
    numbers = tuple(site.index for site in program.recurrences)
    problems = []
    if numbers != tuple(range(len(numbers))):
        problems.append(f"indices of recurrent sites are {list(numbers)}, expected 0 to {len(numbers) - 1} in order")
    for function, expected in ({recur: numbers} if calls is None else calls).items():
        found = [node.args[1] for node in module.graph.nodes if node.target is function]
        if found != list(expected):
            problems.append(
                f"{label}: {function.__name__} is called for recurrent sites {found}, expected {list(expected)}"
            )
    return problems


def _selector(program: Program, selector: GraphModule) -> list[str]:
    """The speculative selector reads what the lowered graphs let the memory see, and nothing else."""
    seen = {}
    for label in LOWERED:
        module = getattr(program, label)
        nodes = module.graph.nodes if module is not None else ()
        seen[label] = [node.args[1] for node in nodes if node.target is memory.observe]
    reads = "features" in placeholders(selector.graph)
    problems = _graph_problems(selector, "selector", (*BODY_INPUTS, "features") if reads else BODY_INPUTS, frozenset())
    problems += (
        _no_guards(selector, "selector")
        + _no_defaults(selector, "selector")
        + _shares_parameters(program.body, selector, "selector")
    )
    if len({tuple(sorted(sites)) for sites in seen.values()}) > 1 or reads != bool(seen["decode"]):
        problems.append(
            f"selector: {'reads' if reads else 'does not read'} features, but the graphs observe sites {seen}"
        )
    return problems


def _no_guards(module: GraphModule, label: str) -> list[str]:
    return [
        f"{label}: {describe(node)} is a guard; canonicalise removes them"
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target.name().startswith(FORBIDDEN_NAMES)
    ]


def _no_defaults(module: GraphModule, label: str) -> list[str]:
    return [
        f"{label}: {describe(node)} takes its dtype from the default of the process; name it (pin_defaults does)"
        for node in module.graph.nodes
        if reads_default(node)
    ]


def _sites_are_numbered(sites: tuple[AttentionSite, ...]) -> list[str]:
    indices = [site.index for site in sites]
    problems = []
    if indices != list(range(len(sites))):
        problems.append(f"site indices are {indices}, expected 0 to {len(sites) - 1} in order")
    for site in sites:
        if site.kv_heads < 1 or site.q_heads % site.kv_heads:
            problems.append(
                f"site {site.index}: {site.q_heads} query heads are no multiple of {site.kv_heads} KV heads"
            )
    return problems


def _node_matches_site(node: Node, site: AttentionSite) -> list[str]:
    """Shapes, flags and constants of a `semkv::attention` node against its site."""
    problems = []
    q, k, v = node.args[:3]
    expected = {
        "q": (q, site.q_heads, site.key_dim),
        "k": (k, site.kv_heads, site.key_dim),
        "v": (v, site.kv_heads, site.value_dim),
    }
    for name, (operand, heads, dim) in expected.items():
        shape = shape_of(operand) if isinstance(operand, Node) else None
        if shape is None:
            continue
        if len(shape) != 4 or shape[1] != heads or shape[3] != dim:
            problems.append(
                f"{describe(node)}: {name} has shape {shape}, expected [B, {heads}, T, {dim}] for site {site.index}"
            )
    extra = {name: node.args[i] if len(node.args) > i else node.kwargs.get(name) for i, name in _OPTIONAL}
    if (extra["sinks"] is not None) != site.has_sinks:
        problems.append(
            f"{describe(node)}: sinks={extra['sinks']} but site {site.index} has has_sinks={site.has_sinks}"
        )
    biased = extra["bias_slopes"] is not None or extra["bias_table"] is not None
    if biased != site.has_bias:
        problems.append(f"{describe(node)}: bias={biased} but site {site.index} has has_bias={site.has_bias}")
    if (node.kwargs.get("chosen") is not None) != (site.chooser >= 0):
        problems.append(
            f"{describe(node)}: chosen={node.kwargs.get('chosen')} but site {site.index} has chooser {site.chooser}"
        )
    for name in ("scale", "softcap", "window", "chunk"):
        value = node.kwargs.get(name, 0)
        if value != getattr(site, name):
            problems.append(f"{describe(node)}: {name}={value}, site {site.index} has {getattr(site, name)}")
    return problems


_OPTIONAL = ((4, "sinks"), (5, "bias_slopes"), (6, "bias_table"))


def _shares_parameters(body: GraphModule, module: GraphModule, label: str) -> list[str]:
    """Tensors of one name must be one storage in the body and in the lowered graphs: weights are never copied."""
    problems = []
    for node in module.graph.nodes:
        if node.op != "get_attr":
            continue
        try:
            original, lowered = attribute(body, str(node.target)), attribute(module, str(node.target))
        except AttributeError:
            continue
        if isinstance(original, torch.Tensor) and isinstance(lowered, torch.Tensor):
            same = original is lowered or original.untyped_storage()._cdata == lowered.untyped_storage()._cdata
            if not same:
                problems.append(f"{label}: {node.target} is a copy of the body's tensor, expected shared storage")
    return problems


_CHECKS: dict[str, Callable[[Program], list[str]]] = {
    "captured": _captured,
    "found": _found,
    "annotated": _annotated,
    "lowered": _lowered,
}
