"""Slots in C++ and in PyTorch: the same numbers, whatever comes and goes; and both keep what the workspace promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv.kernels.cpp import compiler
from semkv.kernels.slots.cpp import assign_slots_cpp, extent_cpp, release_slots_cpp
from semkv.kernels.slots.reference import EMPTY, assign_slots_reference, extent_reference, release_slots_reference

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


def state(heads: int, slots: int) -> list[torch.Tensor]:
    """segment, tokens, positions of an empty workspace."""
    return [
        torch.full((heads, slots), -1), torch.full((heads, slots), -1), torch.full((heads, slots), EMPTY, dtype=torch.int32)
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 40), st.integers(0, 2**32 - 1), st.sampled_from([0.05, 0.5, 0.95]))
def test_steps_are_the_references(heads, segments, seed, share):
    chance = torch.Generator().manual_seed(seed)
    length = torch.randint(0, 6, (segments,), generator=chance)
    start = length.cumsum(0) - length + 7
    slots = int(length.sum()) + 3
    ours, theirs = state(heads, slots), state(heads, slots)
    held = torch.zeros(heads, segments, dtype=torch.bool)
    for _ in range(4):
        wanted = torch.rand(heads, segments, generator=chance) < share
        counts = release_slots_cpp(wanted, held, length, *ours)
        expected = release_slots_reference(wanted, held, length, *theirs)
        assert torch.equal(torch.stack(counts), torch.stack(expected))
        found = assign_slots_cpp(wanted, held, length, start, *ours[:2], int(counts[1].sum()))
        wished = assign_slots_reference(wanted, held, length, start, *theirs[:2])
        for mine, other in zip((*found, *ours), (*wished, *theirs)):
            assert torch.equal(mine, other)
        at, of = found
        assert torch.equal(at // slots, of)
        for stored in (ours[2], theirs[2]):
            stored.view(-1)[at] = ours[1].view(-1)[at].to(torch.int32)
        held = wanted
        assert extent_cpp(ours[0]) == extent_reference(theirs[0])
        for head in range(heads):  # each wanted token is there once, and nothing else
            there = ours[1][head][ours[0][head] >= 0].sort().values
            tokens = [torch.arange(int(start[s]), int(start[s] + length[s])) for s in wanted[head].nonzero()[:, 0]]
            assert torch.equal(there, torch.cat([torch.empty(0, dtype=torch.int64), *tokens]))


def test_no_slots_and_no_segments():
    wanted, held, length = (
        torch.zeros(2, 0, dtype=torch.bool),
        torch.zeros(2, 0, dtype=torch.bool),
        torch.zeros(0).long(),
    )
    stored = state(2, 0)
    for release in (release_slots_cpp, release_slots_reference):
        assert torch.stack(release(wanted, held, length, *stored)).tolist() == [[0, 0], [0, 0]]
    assert extent_cpp(stored[0]) == extent_reference(stored[0]) == 0


def test_rows_of_a_larger_table_are_read():
    """What is chosen may be a view."""
    wanted = torch.zeros(3, 20, dtype=torch.bool)
    wanted[:, ::3] = True
    held, length, start = torch.zeros(3, 7, dtype=torch.bool), torch.full((7,), 2), 2 * torch.arange(7)
    results = []
    for release, assign in ((release_slots_cpp, assign_slots_cpp), (release_slots_reference, assign_slots_reference)):
        stored = state(3, 20)
        _, lacking = release(wanted[:, ::3], held, length, *stored)
        assert lacking.tolist() == [14, 14, 14]
        more = (int(lacking.sum()),) if assign is assign_slots_cpp else ()
        results.append([*assign(wanted[:, ::3], held, length, start, *stored[:2], *more), *stored])
    assert all(torch.equal(mine, other) for mine, other in zip(*results))
