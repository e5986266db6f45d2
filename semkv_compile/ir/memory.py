"""The protocol between a lowered program and the memory that it runs on.

A lowered graph holds, for each attention site, one call of a function of this module and one
`semkv::mixed_attention` on the tensors that the call returns. The memory is an argument of the graph: there is no
registry, and two memories never share state unless they were forked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from semkv.ir.choices import chosen_bias, chunk_bias
from semkv.ir.recurrence import Choice, Pieces


class Entries(NamedTuple):
    """Arguments 2 to 16 of `semkv::mixed_attention`, in its order: what one softmax is taken over.

    Exact and coarse entries come in blocks, so that each stays where it is stored; a coarse entry has its log size in its block's
    bias. Shapes: B rows, T query tokens, Hq query heads, Hkv KV heads, N entries of one block, F factored spans of at most L tokens
    and rank R. A dimension written `Hkv|1` broadcasts. A bias of -inf, or a position after every query's, marks an entry that is
    absent. `block_heads` says where the blocks are of fewer rows or heads than there are: the place row * Hkv + KV head of each
    block's first one, from which it goes on without a gap; then B, Hkv and Hq in the shapes of a block are its own. None: each has
    all. Every place has a block, which may be empty.

    Keys or values of a block that has a scale for them are packed codes uint8 [B, Hkv, N, width], 8 bits where the width is the head
    dim and 4 where it is half of it, rounded up (`semkv.runtime.store.quantization.Quantized`); see `semkv.ir.ops.value_dim` for that of
    values. Scales have no gradient.
    """

    block_k: list[Tensor]  # [B, Hkv, N, D] each, or codes
    block_v: list[Tensor]  # [B, Hkv, N, Dv], or codes
    block_positions: list[Tensor]  # [B, Hkv|1, N] integers
    block_bias: list[Tensor | None] | None = None  # [B, Hq|1, T|1, N]
    block_heads: list[int] | None = None
    block_k_scale: list[Tensor | None] | None = None  # float16 [B, Hkv, N, 1]
    block_v_scale: list[Tensor | None] | None = None  # float16 [B, Hkv, N, 1]
    key_u: Tensor | None = None  # [B, Hkv, F, L, R]
    key_s: Tensor | None = None  # [B, Hkv, F, R]
    key_v: Tensor | None = None  # [B, Hkv, F, D, R]
    value_u: Tensor | None = None  # [B, Hkv, F, L, R]
    value_s: Tensor | None = None  # [B, Hkv, F, R]
    value_v: Tensor | None = None  # [B, Hkv, F, Dv, R]
    factored_positions: Tensor | None = None  # [B, Hkv|1, F, L] int64
    factored_bias: Tensor | None = None  # [B, Hq|1, T|1, F, L]


class Memory(Protocol):
    """What a lowered program asks of the memory it runs on."""

    def record(self, site: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Prefill: take one site's queries [B, Hq, T, D], keys [B, Hkv, T, D], values [B, Hkv, T, Dv] and positions [B, T]."""

    def entries(self, site: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Entries:
        """Extend and decode: store the new tokens, choose what is unfolded for `q`, and return what attention reads."""


class States(Protocol):
    """What a program asks besides where modules go on from recurrent states."""

    def read_states(self, site: int) -> Sequence[Tensor] | None:
        """The states [B, ...] of a recurrent site, or the index keys of each row where it chooses tokens; None before the first token."""

    def write_states(self, site: int, states: Sequence[Tensor]) -> None:
        """Take them after the tokens of this call."""

    def take_choice(self, site: int, places: Tensor) -> None:
        """Take what a site that chooses tokens has chosen for those of this call: places [B, T, n], below 0: none."""


class Observer(Protocol):
    """What a program asks besides where a method reads hidden states of the token before."""

    def observe(self, site: int, hidden: Tensor) -> None:
        """Take the hidden states [B, T, H] with which the tokens enter a site's layer."""


class Inputs(Protocol):
    """What a program asks besides where a prompt may bring more than ids (`semkv.ir.seams.Seams`)."""

    def embedded(self, x: Tensor) -> Tensor:
        """The embeddings [B, T, H] of the tokens of this call, where `x` are those of their ids."""

    def entering(self, site: int, x: Tensor) -> Tensor:
        """The hidden states that enter a site's layer, where `x` [B, T, H] are those that left the layer before."""

    def rotary(self, positions: Tensor, axes: int) -> Tensor:
        """The rotary positions int64 [axes, B, T] of tokens whose places in their rows are `positions` [B, T]."""


class TextInputs:
    """`Inputs` of text alone: a token is its id, and its rotary position its place."""

    def embedded(self, x: Tensor) -> Tensor:
        """See `Inputs.embedded`."""
        return x

    def entering(self, site: int, x: Tensor) -> Tensor:
        """See `Inputs.entering`."""
        return x

    def rotary(self, positions: Tensor, axes: int) -> Tensor:
        """See `Inputs.rotary`."""
        return positions.expand(axes, *positions.shape)


@has_side_effect
def record(memory: Memory, site: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
    """Graph function of the prefill program; see `Memory.record`."""
    memory.record(site, q, k, v, positions)


@has_side_effect
def entries(memory: Memory, site: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Entries:
    """Graph function of the extend and decode programs; see `Memory.entries`."""
    return memory.entries(site, q, k, v, positions)


@has_side_effect
def read_states(memory: States, site: int) -> Sequence[Tensor] | None:
    """Graph function of the decode program; see `States.read_states`."""
    return memory.read_states(site)


@has_side_effect
def write_states(memory: States, site: int, states: Sequence[Tensor]) -> None:
    """Graph function of the decode program; see `States.write_states`."""
    memory.write_states(site, states)


@has_side_effect
def advance(
    memory: States, site: int, pieces: Pieces, tensors: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor]:
    """Graph function of the prefill and extend programs, and of decode where it chooses tokens: a recurrent site over tensors
    [B, T, ...], from the memory's states on."""
    outputs, after = pieces(tensors, memory.read_states(site), weights)
    memory.write_states(site, after)
    if isinstance(pieces, Choice):
        memory.take_choice(site, outputs[0])
    return outputs


@has_side_effect
def observe(memory: Observer, site: int, hidden: Tensor) -> None:
    """Graph function of all lowered programs; see `Observer.observe`."""
    memory.observe(site, hidden)


def embedded(memory: Inputs, x: Tensor) -> Tensor:
    """Graph function of the prefill and extend programs; see `Inputs.embedded`."""
    return memory.embedded(x)


def entering(memory: Inputs, site: int, x: Tensor) -> Tensor:
    """Graph function of the prefill and extend programs; see `Inputs.entering`."""
    return memory.entering(site, x)


def rotary(memory: Inputs, positions: Tensor, axes: int) -> Tensor:
    """Graph function of all lowered programs; see `Inputs.rotary`."""
    return memory.rotary(positions, axes)


def read_chosen(entries: Entries, chosen: Tensor, positions: Tensor, kv_heads: int, group: int) -> Entries:
    """Graph function of the extend and decode programs: the entries, of which each query reads those alone that are among `chosen`
    [B, T, n]; all are tokens at their places in their rows. A query of whose chosen tokens none is there reads all that are.

    positions: of the queries [B, T]. kv_heads, group: of the site: KV heads of a row, and query heads of one.
    """
    if entries.factored_positions is not None:
        raise RuntimeError("factored spans are no tokens that a site's own choice could name")
    rows, tokens, _ = chosen.shape
    given = entries.block_bias or [None] * len(entries.block_k)
    found = torch.zeros(rows * kv_heads, tokens, dtype=torch.bool, device=chosen.device)
    own: list[tuple[int, Tensor]] = []
    for number, places in enumerate(entries.block_positions):
        count, heads = entries.block_k[number].shape[:2]
        first = 0 if entries.block_heads is None else entries.block_heads[number]
        row = slice(first // kv_heads, first // kv_heads + count)
        bias = chosen_bias(chosen[row], places.expand(count, -1, -1))  # [count, heads|1, T, N]
        seen = (bias == 0) & (places[:, :, None] <= positions[row][:, None, :, None])
        if given[number] is not None:
            seen = seen & (given[number] > float("-inf")).unflatten(
                1, (-1, group if given[number].shape[1] > 1 else 1)
            ).any(2)
        found[first : first + count * heads] |= seen.any(-1).expand(count, heads, -1).flatten(0, 1)
        own.append((first, bias))
    made: list[Tensor | None] = []
    for (first, bias), before, k in zip(own, given, entries.block_k):
        count, heads = k.shape[:2]
        lost = ~found[first : first + count * heads].view(count, heads, tokens)
        if bool(lost.any()):
            bias = torch.where(lost[..., None], torch.zeros_like(bias), bias)
        if bias.shape[1] > 1:  # each KV head holds other tokens
            bias = bias.repeat_interleave(group, 1)
        made.append(bias if before is None else bias + before)
    return entries._replace(block_bias=made)


def chosen_among(chosen: Tensor, positions: Tensor) -> list[Tensor]:
    """Graph function of the prefill program: the bias of the one block of the tokens of this call; see `semkv.ir.choices.chosen_bias`."""
    return [chosen_bias(chosen, positions[:, None])]


def read_chunk(entries: Entries, positions: Tensor, kv_heads: int, group: int, chunk: int) -> Entries:
    """Graph function of the extend and decode programs: the entries, of which each query at `positions` [B, T] reads those alone that are
    in its own run of `chunk` positions. kv_heads, group: of the site, see `read_chosen`."""
    given = entries.block_bias or [None] * len(entries.block_k)
    made: list[Tensor | None] = []
    for number, (before, places) in enumerate(zip(given, entries.block_positions)):
        count, heads = entries.block_k[number].shape[:2]
        first = 0 if entries.block_heads is None else entries.block_heads[number] // kv_heads
        bias = chunk_bias(positions[first : first + count], places.expand(count, -1, -1), chunk)
        bias = bias if bias.shape[1] == 1 else bias.expand(-1, heads, -1, -1).repeat_interleave(group, 1)
        made.append(bias if before is None else bias + before)
    return entries._replace(block_bias=made)


def chunk_among(positions: Tensor, chunk: int) -> list[Tensor]:
    """Graph function of the prefill program: the bias of the one block of the tokens of this call; see `semkv.ir.choices.chunk_bias`."""
    return [chunk_bias(positions, positions[:, None], chunk)]


GRAPH_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "semkv.memory.record": record,
    "semkv.memory.entries": entries,
    "semkv.memory.observe": observe,
    "semkv.memory.embedded": embedded,
    "semkv.memory.entering": entering,
    "semkv.memory.rotary": rotary,
    "semkv.memory.read_states": read_states,
    "semkv.memory.write_states": write_states,
    "semkv.memory.advance": advance,
    "semkv.memory.read_chosen": read_chosen,
    "semkv.memory.chosen_among": chosen_among,
    "semkv.memory.read_chunk": read_chunk,
    "semkv.memory.chunk_among": chunk_among,
}
"""Names under which artifacts store the functions of this module."""

__all__ = [
    "GRAPH_FUNCTIONS",
    "Entries",
    "Inputs",
    "Memory",
    "Observer",
    "States",
    "TextInputs",
    "advance",
    "chosen_among",
    "chunk_among",
    "embedded",
    "entering",
    "entries",
    "observe",
    "read_chosen",
    "read_chunk",
    "read_states",
    "record",
    "rotary",
    "write_states",
]
