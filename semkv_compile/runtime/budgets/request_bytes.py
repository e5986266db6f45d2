"""The most bytes that a request takes, told before it begins: what an engine admits requests by."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.runtime.budgets.costs import unit_cost_bytes, waiting_cost_bytes
from semkv.runtime.placement import Placement
from semkv.runtime.prompt.record import OBSERVED_QUERIES

GROWTH = 5 / 4
"""Buffers that grow have up to so much of what is in them."""
AHEAD_PAGES = 6
"""Pages of a growing store beyond that, at most."""
CHUNK = 512
"""Tokens of a step, at most, that a window or a note holds beside its own."""


@dataclass(frozen=True)
class RequestBytes:
    """Upper bounds of what one request has allocated.

    device: at any time while it runs, room that is made ahead included: what the budget counts, sliding windows, layers that have not left
    the device yet, logits. host: at any time after its prompt, in memory or, where the configuration says so, in files: folded tokens, the
    tables of both, what a short row keeps for its method. reading: on the host while its prompt is read and compressed, `host` included.

    What computing takes on the way is not in them: activations of a chunk or a step, and the second copy of a tensor while it grows.
    """

    device: int
    host: int
    reading: int


def request_bytes(placement: Placement, compute: torch.dtype, prompt: int | None, length: int) -> RequestBytes:
    """Of a request of `length` tokens in all, `prompt` of them its prompt, None: any number; compute: in which the program runs."""
    host = _host_bytes(placement, compute, length)
    read = _record_bytes(placement, compute, prompt or length)
    prompts = (1, length) if prompt is None else (prompt,)  # bytes go by it evenly
    device = max(_device_bytes(placement, compute, n, length) for n in prompts)
    return RequestBytes(*map(math.ceil, (device, host, read + host)))


# -- device ------------------------------------------------------------------------------------------------------------


def _device_bytes(placement: Placement, compute: torch.dtype, prompt: int, length: int) -> int:
    program, budget = placement.program, placement.budget
    total = program.vocab_size * compute.itemsize
    for store in program.stores:
        if store.treatment == "window":
            total += _growing(placement, store, min(length, store.window + CHUNK))
        elif store.treatment != "method" or budget.uncapped:
            total += _growing(placement, store, length)
    if budget.uncapped or not placement.budgeted:
        return total
    keeps = placement.plan.keeps_generated
    cap = budget.cap_bytes(placement.budgeted, prompt if keeps else length)
    for store in placement.budgeted:
        if keeps:  # what follows stays, in a window that grows with what is there of the prompt
            total += _growing(placement, store, length - prompt + placement.page_size)
        parts = len(placement.parts(store))
        total += 2 * parts * placement.page_size * _token_bytes(placement, store)  # a page ahead of each, of tokens
        total += _resident(placement, store, length)
    return total + int(cap * GROWTH if keeps else cap)


def _token_bytes(placement: Placement, store: AttentionSite) -> int:
    """Of an exact token with its position and its score in each head."""
    return store.values_per_token * placement.budget.dtype.itemsize + 8 * store.kv_heads


def _growing(placement: Placement, store: AttentionSite, tokens: int) -> int:
    """Bytes of a buffer for exact tokens that grows up to `tokens`."""
    page = placement.page_size
    token = store.values_per_token * placement.budget.dtype.itemsize + 4
    return int(GROWTH * tokens + AHEAD_PAGES * page) * token


def _resident(placement: Placement, store: AttentionSite, length: int) -> int:
    """Bytes of folded tokens that wait on the device as long as their layer has not left it."""
    if store.host_from is None:
        return 0
    tokens = min(length, store.host_from)
    return int(GROWTH * tokens + CHUNK) * _waiting(placement, store)


# -- host --------------------------------------------------------------------------------------------------------------


def _host_bytes(placement: Placement, compute: torch.dtype, length: int) -> int:
    """What waits there, tables of what is folded, ids, notes, and what a short row keeps."""
    total = 8 * int(GROWTH * length) + _notes(placement, length)
    if not placement.budget.uncapped:
        total += _folded(placement, length)
    short = min(length, placement.budget.floor) if placement.outgrown else 0
    return total + short * (_asked(placement.program, compute) + _observed(placement, compute) + 4)


def _folded(placement: Placement, length: int) -> int:
    """Folded tokens, the tables of units, and, where steps are graphs, the buffers that they read what is on the device from."""
    tokens, units, most = int(GROWTH * length), 0, 0.0
    cap = placement.budget.cap_bytes(placement.budgeted, length)
    total = tokens * sum(_waiting(placement, store) for store in placement.budgeted)
    for store in placement.budgeted:
        for part in placement.parts(store):
            site, components = part.site(store), part.components
            if components.segmenter is None:
                continue
            if components.unfold and components.router is not None:
                total += tokens * (8 + 16 * site.kv_heads)  # of each, where it waits, twice, and whose it is
            table = 32 + 40 * site.kv_heads + (64 * site.kv_heads if components.forms is not None else 0)
            cost = site.kv_heads * unit_cost_bytes(site, components, placement.budget.dtype)
            units += tokens * table
            most = max(most, table / cost if cost else math.inf)
    total += int(min(units, GROWTH * cap * most))  # units are as many as tokens, or as there is room for on the device
    return total + (cap if units and placement.steps is not None else 0)


def _waiting(placement: Placement, store: AttentionSite) -> int:
    """Bytes of a folded token in all heads."""
    dtype = placement.budget.dtype
    parts = placement.parts(store)
    return sum(waiting_cost_bytes(part.site(store), part.components, dtype) for part in parts)


def _notes(placement: Placement, length: int) -> int:
    """Bytes of what components keep between steps and the budget does not count."""
    program, total = placement.program, 0
    for note in placement.plan.notes.values():
        if note.charged:
            continue
        open_sizes = note.shape.count(None)
        rows = length if len(note.shape) == 1 else min(length, CHUNK)
        known = math.prod(size for size in note.shape if size is not None)
        total += known * note.dtype.itemsize * rows ** min(1, open_sizes) * (_width(program) if open_sizes > 1 else 1)
    return total


# -- prompts -----------------------------------------------------------------------------------------------------------


def _record_bytes(placement: Placement, compute: torch.dtype, prompt: int) -> int:
    """Keys, values and what else a record has, and a second copy of the largest store while it is converted."""
    program, plan = placement.program, placement.plan
    itemsize = max(placement.budget.dtype.itemsize, compute.itemsize)
    stores = [store.values_per_token * itemsize for store in program.stores]
    queries = prompt if plan.reads_queries else min(prompt, OBSERVED_QUERIES)
    kept = prompt * (sum(stores) + max(stores) + _observed(placement, compute) + 12)
    return kept + queries * _asked(program, compute)


def _asked(program: Program, compute: torch.dtype) -> int:
    """Bytes of a token's queries at all sites."""
    return sum(site.q_heads * site.key_dim for site in program.sites) * compute.itemsize


def _observed(placement: Placement, compute: torch.dtype) -> int:
    """Bytes of a token's hidden states that a retrieval head reads."""
    return len(placement.plan.features) * _width(placement.program) * compute.itemsize


def _width(program: Program) -> int:
    """Numbers of a hidden state, at most: the widest that the head reads."""
    return max((x.shape[-1] for x in program.head.parameters() if x.dim() > 1), default=1)


__all__ = ["RequestBytes", "request_bytes"]
