"""Run a lowered program: prefill a row, or add tokens to a state."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.ir.program import Program
from semkv.runtime.record import Recorder, RowRecord, chunked_surprisal, head_orders
from semkv.runtime.state import State


@torch.no_grad()
def prefill_row(
    program: Program, ids: Tensor, kv_dtype: torch.dtype, *, surprisal: bool, all_queries: bool = False
) -> RowRecord:
    """Run the prompt ids int64 [n] in full and keep its keys and values on the host."""
    record = RowRecord(ids=ids.cpu(), all_queries=all_queries, head_orders=head_orders(program))
    positions = torch.arange(len(ids), device=ids.device)[None]
    hidden = program.prefill(ids[None], positions, Recorder(program, record, kv_dtype))
    record.logits = program.head(hidden[:, -1:])[0, 0]
    if surprisal:
        record.surprisal = chunked_surprisal(program.head, hidden[0], ids)
    return record


@torch.no_grad()
def step(program: Program, state: State, ids: Tensor, *, all_logits: bool = False) -> Tensor:
    """Add the tokens ids int64 [B, T] to the rows of `state`.

    Returns the logits [B, T, vocab] after each token where `all_logits`, else [B, 1, vocab] after the last.
    """
    graph = program.decode if ids.shape[1] == 1 else program.extend
    start = torch.tensor(state.lengths, device=ids.device)[:, None]
    positions = start + torch.arange(ids.shape[1], device=ids.device)
    state.begin_step(ids)
    if program.batched or len(state.rows) == 1:
        hidden = graph(ids, positions, state)
    else:
        parts = []
        for row in range(len(state.rows)):
            single = State(state.placement, [state.rows[row]], state.logits[row : row + 1])
            single.begin_step(ids[row : row + 1])
            parts.append(graph(ids[row : row + 1], positions[row : row + 1], single))
        hidden = torch.cat(parts)
    needed = all_logits or (ids.shape[1] > 1 and state.placement.plan.reads_surprisal)
    logits = program.head(hidden if needed else hidden[:, -1:])
    state.end_step(ids, logits)
    return logits if all_logits else logits[:, -1:]


def extend(program: Program, state: State, ids: Tensor, chunk: int, *, all_logits: bool = False) -> Tensor:
    """`step` over ids [B, T] in chunks of at most `chunk` tokens, smaller ones where the budget has less room."""
    parts, start = [], 0
    while start < ids.shape[1]:
        part = ids[:, start : start + min(chunk, state.chunk_limit())]
        parts.append(step(program, state, part, all_logits=all_logits))
        start += part.shape[1]
    return torch.cat(parts, dim=1) if all_logits else parts[-1]
