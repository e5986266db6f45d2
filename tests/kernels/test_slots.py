"""Slots in C++ and in PyTorch: the same numbers, whatever comes and goes; and both keep what the workspace promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv.kernels.cpp import compiler
from semkv.kernels.slots.cpp import assign_slots_cpp, extent_cpp, release_slots_cpp
from semkv.kernels.slots.reference import (
    EMPTY,
    Even,
    Segments,
    assign_slots_reference,
    extent_reference,
    release_slots_reference,
)

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


def state(heads: int, slots: int) -> list[torch.Tensor]:
    """segment, tokens, positions of an empty workspace."""
    return [
        torch.full((heads, slots), -1),
        torch.full((heads, slots), -1),
        torch.full((heads, slots), EMPTY, dtype=torch.int32),
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 140),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.05, 0.5, 0.95]),
    st.sampled_from([None, 1, 3]),
)
def test_steps_are_the_references(heads, segments, seed, share, each):
    """Segments of any lengths, and as regular as pages."""
    chance = torch.Generator().manual_seed(seed)
    length = torch.randint(0, 6, (segments,), generator=chance) if each is None else torch.full((segments,), each)
    start = length.cumsum(0) - length + 7
    position = start.flip(0) + 3 if each is None else start + 3
    stored = Segments(length, position, start)
    assert stored.even == (None if each is None or not segments else Even(each, 10, 7)) or segments < 3
    slots = int(length.sum()) + 3
    ours, theirs = state(heads, slots), state(heads, slots)
    held = torch.zeros(heads, segments, dtype=torch.bool)
    for _ in range(4):
        wanted = torch.rand(heads, segments, generator=chance) < share
        counts = release_slots_cpp(wanted, held, stored, *ours)
        expected = release_slots_reference(wanted, held, stored, *theirs)
        assert torch.equal(torch.stack(counts), torch.stack(expected))
        found = assign_slots_cpp(wanted, held, stored, *ours[:2], counts[1])
        wished = assign_slots_reference(wanted, held, stored, *theirs[:2], expected[1])
        for mine, other in zip((*found, *ours), (*wished, *theirs)):
            assert torch.equal(mine, other)
        at, of, places, where = found
        assert torch.equal(at // slots, of)
        assert torch.equal(places, ours[1].view(-1)[at])
        assert torch.equal(where, (places - start[ours[0].view(-1)[at]] + position[ours[0].view(-1)[at]]).int())
        for positions in (ours[2], theirs[2]):
            positions.view(-1)[at] = where
        held = wanted[:, : segments - int(torch.randint(0, segments + 1, (), generator=chance))]
        held = (
            held if not bool(wanted[:, held.shape[1] :].any()) else wanted
        )  # only of the last ones may nothing be said
        assert extent_cpp(ours[0]) == extent_reference(theirs[0])
        for head in range(heads):  # each wanted token is there once, and nothing else
            there = ours[1][head][ours[0][head] >= 0].sort().values
            tokens = [torch.arange(int(start[s]), int(start[s] + length[s])) for s in wanted[head].nonzero()[:, 0]]
            assert torch.equal(there, torch.cat([torch.empty(0, dtype=torch.int64), *tokens]))


def test_no_slots_and_no_segments():
    wanted, held = torch.zeros(2, 2, 0, dtype=torch.bool)
    segments, stored = Segments(*torch.zeros(3, 0).long()), state(2, 0)
    assert segments.even is None
    for release in (release_slots_cpp, release_slots_reference):
        assert torch.stack(release(wanted, held, segments, *stored)).tolist() == [[0, 0], [0, 0]]
    assert extent_cpp(stored[0]) == extent_reference(stored[0]) == 0


def test_rows_of_a_larger_table_are_read():
    """What is chosen may be a view."""
    wanted = torch.zeros(3, 20, dtype=torch.bool)
    wanted[:, ::3] = True
    held, segments = (
        torch.zeros(3, 5, dtype=torch.bool),
        Segments(torch.full((7,), 2), *(2 * torch.arange(14).view(2, 7))),
    )
    results = []
    for release, assign in ((release_slots_cpp, assign_slots_cpp), (release_slots_reference, assign_slots_reference)):
        stored = state(3, 20)
        _, lacking = release(wanted[:, ::3], held, segments, *stored)
        assert lacking.tolist() == [14, 14, 14]
        results.append([*assign(wanted[:, ::3], held, segments, *stored[:2], lacking), *stored])
    assert all(torch.equal(mine, other) for mine, other in zip(*results))
