"""Run a lowered program: prefill a row, or add tokens to a state."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from semkv.ir.program import Program
from semkv.runtime.host.tier import HostTier
from semkv.runtime.modes import undisturbed
from semkv.runtime.prompt.content import Content
from semkv.runtime.prompt.prefill import Prefill
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.state import State


@undisturbed
def prefill_row(
    program: Program,
    ids: Tensor,
    kv_dtype: torch.dtype,
    *,
    surprisal: bool,
    all_queries: bool = False,
    chunk: int | None = None,
    tier: HostTier | None = None,
    logits: int = 1,
    content: Content | None = None,
) -> RowRecord:
    """Run the prompt ids int64 [n], `chunk` tokens at a time (None: all at once), and keep its keys and values in `tier`, and the logits
    after its last `logits` tokens. content: what the tokens are besides ids."""
    n = len(ids)
    chunk = n if chunk is None else chunk
    prefill = Prefill(program, kv_dtype, ids.device, surprisal=surprisal, all_queries=all_queries, tier=tier, tokens=n)
    kept = []
    for start, end in chunks_of(program, n, chunk, content):
        part = ids[start:end]
        hidden = prefill.feed(part, None if content is None else content.part(start, end))
        if start + len(part) > n - logits:
            kept.append(program.head(hidden[:, max(0, n - logits - start) :])[0])
    record = prefill.finish()
    record.last_logits = torch.cat(kept)
    record.logits = record.last_logits[-1]
    return record


def chunks_of(program: Program, tokens: int, chunk: int, content: Content | None = None) -> list[tuple[int, int]]:
    """The chunks of a prompt as (first, end). Runs of tokens that attend both ways are chunks of their own, however long. Where modules go
    on from recurrent states none is of a single token behind others: by a model's own code that may be another computation."""
    ends = [*range(chunk, tokens, chunk), tokens]
    if program.stateful and chunk > 2 and len(ends) > 1 and ends[-1] - ends[-2] == 1:
        ends[-2] -= 1
    if content is not None and content.blocks:
        inside = {end for end in ends if any(a < end < b for a, b in content.blocks)}
        ends = sorted((set(ends) - inside | content.edges()) - {0})
    return list(pairwise((0, *ends)))


@undisturbed
def step(
    program: Program, state: State, ids: Tensor, *, all_logits: bool = False, content: Content | None = None
) -> Tensor:
    """Add the tokens ids int64 [B, T] to the rows of `state`. content: what those of a single row are besides ids.

    Returns the logits [B, T, vocab] after each token where `all_logits`, else [B, 1, vocab] after the last.
    """
    graph = program.decode if ids.shape[1] == 1 and content is None else program.extend
    start = torch.tensor(state.lengths, dtype=torch.int64, device=ids.device)[:, None]
    positions = start + torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device)
    state.begin_step(ids, content)
    if content is None and state.steps_as_graph(ids.shape[1]):
        hidden = state.graph_step(ids, positions)
    elif program.batched or len(state.rows) == 1:
        hidden = graph(ids if content is None else ids.clamp(min=0), positions, state)
    else:
        parts = []
        for row in range(len(state.rows)):
            parts.append(graph(ids[row : row + 1], positions[row : row + 1], state.alone(row)))
        hidden = torch.cat(parts)
    needed = all_logits or (ids.shape[1] > 1 and state.placement.plan.reads_surprisal)
    logits = program.head(hidden if needed else hidden[:, -1:])
    state.end_step(ids, logits)
    return logits if all_logits else logits[:, -1:]


def extend(
    program: Program,
    state: State,
    ids: Tensor,
    chunk: int,
    *,
    exact_chunk: int | None = None,
    all_logits: bool = False,
    content: Content | None = None,
) -> Tensor:
    """`step` over ids [B, T] in chunks of at most `chunk` tokens, smaller ones where the budget has less room; of `exact_chunk`, where
    that is another number, as long as every row is exact."""
    exact_chunk = chunk if exact_chunk is None else exact_chunk
    parts, start = [], 0
    while start < ids.shape[1]:
        state.outgrow(1)
        exact = state.exact_tokens(exact_chunk)
        limit = state.chunk_limit() if ids.shape[1] - start > 1 else 1
        part = ids[:, start : start + (exact or min(chunk, limit))]
        own = None if content is None else content.part(start, start + part.shape[1])
        parts.append(step(program, state, part, all_logits=all_logits, content=own))
        start += part.shape[1]
    return torch.cat(parts, dim=1) if all_logits else parts[-1]
