"""A memory that is built block by block is the one that is built at once."""

from __future__ import annotations

import pytest
import torch

from semkv.runtime import row_memory
from semkv.runtime.host.pool import ROOM
from semkv.runtime.snapshot import row_to_tensors

CASES = {
    "sekv": {},
    "quest": {},
    "infllm": {},
    "clusterkv": {},
    "shadowkv": {},
    "compresskv": {"recoverable": True},
    "sentencekv": {"buckets": "chunks", "query": "token"},
}


@pytest.mark.parametrize("method", list(CASES))
def test_blocks_give_the_same_memory(compile_as, wide_program, prompt, monkeypatch, method):
    compiled = compile_as(wide_program, method, 0.25, options=CASES[method])
    record = compiled.prefill_record(prompt(700))
    monkeypatch.setattr(row_memory, "FOLD_BLOCKS", 1)
    whole = compiled.compress(record)
    record.known.clear()
    monkeypatch.setattr(row_memory, "FOLD_BLOCK", 64)
    monkeypatch.setattr(row_memory, "FOLD_BLOCKS", 64)
    blocks = compiled.compress(record)
    facts, tensors = row_to_tensors(whole.rows[0])
    got_facts, got = row_to_tensors(blocks.rows[0])
    assert got_facts == facts
    assert got.keys() == tensors.keys()
    for name, x in tensors.items():
        assert got[name].dtype == x.dtype, name
        torch.testing.assert_close(got[name], x, rtol=0, atol=0, msg=name)


def test_one_block_of_a_prompt_is_in_work_at_a_time(compile_as, wide_program, prompt, monkeypatch):
    seen = []
    monkeypatch.setattr(row_memory, "FOLD_BLOCK", 64)
    monkeypatch.setattr(row_memory, "FOLD_BLOCKS", 64)
    fold = row_memory.FoldedSpans.fold
    monkeypatch.setattr(
        row_memory.FoldedSpans,
        "fold",
        lambda spans, folding, shared: (seen.append(folding.k.shape[1]), fold(spans, folding, shared))[1],
    )
    state = compile_as(wide_program, "sekv", 0.25).prefill(prompt(700))
    folded = sum(memory.spans.host_tokens.length for memory in state.rows[0].budgeted())
    assert sum(seen) == folded
    assert max(seen) <= 64 + 16  # a span is not cut


@pytest.mark.parametrize("limit", [None, "1GB"])
def test_room_for_all_tokens_is_made_at_once(compile_as, wide_program, prompt, monkeypatch, limit):
    monkeypatch.setattr(row_memory, "FOLD_BLOCK", 64)
    state = compile_as(wide_program, "quest", 0.25, host_memory=limit).prefill(prompt(700))
    for memory in state.rows[0].budgeted():
        tokens = memory.spans.host_tokens
        ahead = 0 if limit else tokens.length // ROOM
        assert {part._data.shape[1] - part.length for part in tokens.parts.values()} == {ahead}


def test_what_is_folded_after_a_prompt_copies_nothing(compile_as, wide_program, prompt):
    compiled = compile_as(wide_program, "quest", 0.25)
    state = compiled.prefill(prompt(700))
    parts = [part for memory in state.rows[0].budgeted() for part in memory.spans.host_tokens.parts.values()]
    before = [(part.length, part._data.data_ptr()) for part in parts]
    compiled.extend(state, prompt(60))
    assert all(part.length > length for part, (length, _) in zip(parts, before))
    assert [part._data.data_ptr() for part in parts] == [place for _, place in before]


@pytest.mark.parametrize("heads", [None, (1, 0)])
def test_prefill_lets_go_of_what_a_memory_was_built_of(compile_as, wide_program, prompt, monkeypatch, heads):
    compiled = compile_as(wide_program, "sekv", 0.25)
    record = compiled.prefill_record(prompt(300))
    if heads is not None:
        record.head_orders = {0: heads, 2: heads}  # as a program that moved heads would have made it
    kept = compiled.compress(record)
    assert sorted(record.keys) == sorted(record.values) == [0, 1, 2]
    alive = []
    build = row_memory.RowMemory._build

    def watched(row, store, part, given, there, divided):
        alive.append(sorted(given.keys))
        return build(row, store, part, given, there, divided)

    monkeypatch.setattr(row_memory.RowMemory, "_build", watched)
    state = compiled._state([record], release=True)
    assert alive == [[0, 1, 2], [1, 2], [2]]
    assert not record.keys
    assert not record.values
    for name, x in row_to_tensors(kept.rows[0])[1].items():
        torch.testing.assert_close(row_to_tensors(state.rows[0])[1][name], x, rtol=0, atol=0, msg=name)
