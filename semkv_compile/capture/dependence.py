"""Proof by execution that tokens mix at attention sites only, so that one token can be run at a time.

A node that mixes tokens and belongs to no site (a short convolution, a token shift, a cumulative sum) would be silently
wrong at one token. Every `semkv::attention` is replaced by a function of its own token, and then no token may depend on
another one:

- NaN in what token j's id becomes may not reach another token (0 * NaN is NaN: zero weights hide nothing);
- another id, and another position, of token j may not change another token;
- one row of a batch may not change another row;
- a few tokens run alone, at their positions, must give what they gave inside the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from semkv.errors import CaptureError
from semkv.ir.graph import ancestors, attention_nodes, describe, reads_sizes_only
from semkv.ir.local import RUN_ERRORS, TOLERANCE, close, run_locally
from semkv.ir.program import Program
from semkv.passes.base import Pass, PassOptions
from semkv.passes.graph_utils import value_dependents

LENGTHS = (11, 13, 17, 19, 23)
"""Primes tried as sequence lengths: the first that is no size of a weight, so that the token axis is recognised by its
size."""


@dataclass(frozen=True)
class Probe:
    """Inputs of one experiment: ids and positions [2, T], and the token (row 0) that is disturbed."""

    ids: Tensor
    positions: Tensor
    token: int

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def first_row(self) -> Probe:
        return Probe(self.ids[:1], self.positions[:1], self.token)


class CheckDependence(Pass):
    """Refuse a program whose tokens mix outside its sites; find out whether rows may share a call."""

    name = "dependence"
    needs = "found"
    leaves = "found"
    after = ("find_attention", "lift_positions")

    def run(self, program: Program, options: PassOptions) -> Program:
        """The program, `batched=False` where rows influence each other.

        Raises
        ------
        CaptureError: a node mixes tokens outside an attention site; the message names it and its module.
        """
        with torch.no_grad():
            return _analyse(program)


def _analyse(program: Program) -> Program:
    body = program.body
    _check_attention_inputs(body)
    both = _make_probe(program)
    probe = both.first_row()
    tainted = _nan_reach(body, probe)
    if tainted.others:
        _refuse(tainted.node, probe)
    baseline = run_locally(body, probe.ids, probe.positions)
    _check_ids(program, probe, baseline)
    _check_tokens_alone(program, probe, baseline)
    notes = [f"dependence: tokens mix at the {len(program.sites)} sites only"]
    batched = program.batched
    if not _positions_are_independent(program, probe, baseline):
        notes.append("a far position changes the other tokens of its call (scaling by the largest position)")
        batched = False
    if batched and not _rows_are_independent(program, both):
        notes.append("rows of a batch change each other")
        batched = False
    if not batched:
        notes.append("rows run one at a time")
    return program.evolve("; ".join(notes), batched=batched)


def _make_probe(program: Program) -> Probe:
    """Random ids at the positions 0 to T-1, both rows different."""
    sizes = {size for tensor in program.body.state_dict().values() for size in tensor.shape}
    limit = program.max_positions or max(LENGTHS)
    usable = [length for length in LENGTHS if length <= limit]
    if not usable:
        raise CaptureError(
            f"the model declares {limit} positions; the dependence analysis needs at least {min(LENGTHS)}"
        )
    length = next((length for length in usable if length not in sizes), usable[-1])
    generator = torch.Generator(device="cpu").manual_seed(0)
    device = next((t.device for t in program.body.state_dict().values()), torch.device("cpu"))
    ids = torch.randint(0, program.vocab_size, (2, length), generator=generator, dtype=torch.int64, device="cpu")
    positions = torch.arange(length, dtype=torch.int64, device="cpu").expand(2, length).contiguous()
    return Probe(ids.to(device), positions.to(device), token=length // 2)


def _check_attention_inputs(body: GraphModule) -> None:
    """Sinks and biases are constants; anything else would be a second way for tokens to meet inside a site."""
    for node in attention_nodes(body.graph):
        for extra in (*node.args[4:], *(node.kwargs.get(name) for name in ("sinks", "bias_slopes", "bias_table"))):
            if isinstance(extra, Node) and any(a.op == "placeholder" for a in ancestors([extra])):
                raise CaptureError(
                    f"{describe(node)} has a sink or bias that depends on the tokens; expected constants, which "
                    "one token alone can read"
                )


def _others(probe: Probe, value: Tensor) -> Tensor:
    """The part of [B, T, ...] that may not depend on the disturbed token, flattened to [N, ...]."""
    keep = torch.ones(value.shape[:2], dtype=torch.bool, device=value.device)
    keep[0, probe.token] = False
    return value[keep]


def _entry_nodes(body: GraphModule) -> set[Node]:
    """Where ids become floating point: embeddings, as a rule."""
    whole_numbers: set[Node] = set()
    entries: set[Node] = set()
    for node in body.graph.nodes:
        if node.op == "placeholder" and node.target == "input_ids":
            whole_numbers.add(node)
        if node.op != "call_function" or reads_sizes_only(node) or not isinstance(node.meta.get("val"), Tensor):
            continue
        if any(operand in whole_numbers for operand in node.all_input_nodes):
            floating = node.meta["val"].is_floating_point() or node.meta["val"].is_complex()
            (entries if floating else whole_numbers).add(node)
    return entries


@dataclass(frozen=True)
class Reach:
    """How far NaN of the disturbed token came: whether to other tokens, and the first node where it spread."""

    others: bool
    node: Node | None


def _nan_reach(body: GraphModule, probe: Probe) -> Reach:
    entries = _entry_nodes(body)
    if not entries:
        raise CaptureError("no node turns input_ids into floating point numbers; expected a model from ids to logits")
    share = 1.5 / probe.ids.numel()
    spread: list[Node] = []

    def edit(node: Node, value: Any) -> Any:
        if node in entries:
            value = value.clone()
            value[_token_index(node, value, probe)] = float("nan")
        elif not spread and isinstance(value, Tensor) and float(torch.isnan(value).float().mean()) > share:
            # A node that keeps tokens apart has NaN in one token's share of its numbers, whatever its layout.
            spread.append(node)
        return value

    logits = run_locally(body, probe.ids, probe.positions, edit)
    return Reach(bool(torch.isnan(_others(probe, logits)).any()), spread[0] if spread else None)


def _token_index(node: Node, value: Tensor, probe: Probe) -> tuple:
    """The index of the disturbed token in a value of shape [B, T, ...] or [T, ...] or [B * T, ...]."""
    rows, length = probe.ids.shape
    if value.dim() >= 2 and tuple(value.shape[:2]) == (rows, length):
        return (0, probe.token)
    if value.dim() >= 1 and value.shape[0] in (length, rows * length):
        return (probe.token,)
    if value.dim() >= 2 and tuple(value.shape[:2]) == (length, rows):
        return (probe.token, 0)
    raise CaptureError(
        f"{describe(node)} turns ids into a value of shape {tuple(value.shape)}; expected [batch, tokens, ...] "
        f"({rows} rows, {length} tokens): each token must have its own embedding"
    )


def _refuse(node: Node | None, probe: Probe) -> None:
    where = "a node" if node is None else describe(node)
    raise CaptureError(
        f"{where} mixes tokens outside an attention site: token {probe.token} changes others. Run one "
        "token at a time, the model would give silently wrong answers; convolutions, shifts, recurrences and sums over "
        "tokens cannot be compiled"
    )


def _check_ids(program: Program, probe: Probe, baseline: Tensor) -> None:
    """Paths through integers (a sum over ids, a routing table) carry no NaN."""
    ids = probe.ids.clone()
    ids[0, probe.token] = (ids[0, probe.token] + 1 + program.vocab_size // 2) % program.vocab_size
    changed = run_locally(program.body, ids, probe.positions)
    if not close(_others(probe, changed), _others(probe, baseline)):
        _refuse(_first_difference(program, probe, (ids, probe.positions)), probe)


def _computed_in(body: GraphModule) -> torch.dtype:
    """The coarsest dtype in which anything of a token is computed: calls of other sizes round alike only up to that."""
    (ids, *_) = (node for node in body.graph.nodes if node.op == "placeholder")
    values = [node.meta.get("val") for node in value_dependents([ids])]
    dtypes = {x.dtype for x in values if isinstance(x, Tensor) and x.is_floating_point()}
    return max(dtypes & TOLERANCE.keys(), key=TOLERANCE.__getitem__, default=torch.float32)


def _first_difference(program: Program, probe: Probe, disturbed: tuple[Tensor, Tensor]) -> Node | None:
    """The first node with a token axis whose value at another token changes with the disturbed inputs."""
    clean: dict[str, Tensor] = {}

    def remember(node: Node, value: Any) -> Any:
        if isinstance(value, Tensor):
            clean[node.name] = value
        return value

    found: list[Node] = []
    length = probe.length

    def compare(node: Node, value: Any) -> Any:
        before = clean.get(node.name)
        if found or before is None or before.shape != value.shape or length not in value.shape:
            return value
        axis = list(value.shape).index(length)
        keep = [t for t in range(length) if t != probe.token]
        index = torch.tensor(keep, dtype=torch.int64, device=value.device)
        old, new = before.index_select(axis, index).double(), value.index_select(axis, index).double()
        if float((old - new).nan_to_num().abs().max()) > 1e-3 * max(1.0, float(old.nan_to_num().abs().max())):
            found.append(node)
        return value

    run_locally(program.body, probe.ids, probe.positions, remember)
    run_locally(program.body, *disturbed, compare)
    return found[0] if found else None


def _check_tokens_alone(program: Program, probe: Probe, baseline: Tensor) -> None:
    """The proof itself: tokens run alone at their positions equal the same tokens inside the sequence."""
    for start, stop in ((probe.token, probe.token + 1), (probe.length - 1, probe.length), (2, 5)):
        try:
            alone = run_locally(program.body, probe.ids[:, start:stop], probe.positions[:, start:stop])
        except RUN_ERRORS as error:
            raise CaptureError(
                f"the program does not run on {stop - start} tokens at {start}; its graph fixes the length: {error}"
            ) from error
        if not close(alone, baseline[:, start:stop], _computed_in(program.body)):
            raise CaptureError(
                f"tokens {start} to {stop - 1} run alone differ from the same tokens inside a sequence: a value "
                "in the graph depends on the sequence's length or on other tokens, outside an attention site"
            )


def _with_far_position(program: Program, probe: Probe, tokens: slice) -> Tensor | None:
    """Positions in which `tokens` of the last row stand as far as the model goes; None where it goes no further."""
    count = len(range(*tokens.indices(probe.length)))
    for limit in (program.max_positions or 4096, 4 * probe.length, probe.length + count):
        if limit < probe.length + count:
            continue
        positions = probe.positions.clone()
        positions[-1, tokens] = torch.arange(limit - count, limit, dtype=torch.int64, device=positions.device)
        try:
            run_locally(program.body, probe.ids, positions)
        except RUN_ERRORS:
            continue  # a table of positions that is shorter than declared
        return positions
    return None


def _rows_are_independent(program: Program, probe: Probe) -> bool:
    """Whether a row that runs beside another one, at other positions, equals the row run by itself."""
    positions = _with_far_position(program, probe, slice(0, probe.length))
    positions = probe.positions if positions is None else positions
    try:
        if _nan_reach(program.body, probe).others:
            return False
        together = run_locally(program.body, probe.ids, positions)
        alone = [run_locally(program.body, probe.ids[i : i + 1], positions[i : i + 1]) for i in range(2)]
    except (*RUN_ERRORS, CaptureError):
        return False
    return close(together, torch.cat(alone), _computed_in(program.body))


def _positions_are_independent(program: Program, probe: Probe, baseline: Tensor) -> bool:
    """Whether a far position of one token leaves the other tokens unchanged."""
    positions = _with_far_position(program, probe, slice(probe.token, probe.token + 1))
    if positions is None:
        return True
    changed = run_locally(program.body, probe.ids, positions)
    return close(_others(probe, changed), _others(probe, baseline))
