"""The slots that unfolded tokens stay in, against a workspace made of sets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv.kernels.slots import EMPTY, Segments
from semkv.runtime import host_pool
from semkv.runtime.host_pool import HostTokens, room_kinds
from semkv.runtime.token_store import plain
from semkv.runtime.workspace import ROUND, ROUND_FROM, Workspace, slots_within

HEADS, KEY, VALUE = 3, 5, 4
LENGTHS = torch.tensor([3, 1, 4, 2, 1, 5, 2, 3])
PLACES = torch.tensor([0, 3, 4, 9, 11, 12, 20, 17])
"""Of each segment's first token in the host tier: the last two are out of order, and places 8 is nobody's."""
CPU = torch.device("cpu")
KINDS = room_kinds(KEY, VALUE, torch.float32, codes=False)


def host(segments: int, form: str = "raw") -> tuple[HostTokens, Segments]:
    """The tokens of the first `segments` segments, and their tables."""
    generator = torch.Generator().manual_seed(0)
    tokens = HostTokens(HEADS, KEY, VALUE, torch.float32, form)
    tokens.append(torch.randn(HEADS, 22, KEY, generator=generator), torch.randn(HEADS, 22, VALUE, generator=generator))
    lengths, places = LENGTHS[:segments], PLACES[:segments]
    return tokens, Segments(lengths, 100 + places * 2, places)


def check(workspace: Workspace, tokens: HostTokens, segments: Segments, wanted: torch.Tensor) -> None:
    """Every head holds the tokens of its segments, each once, and nothing else can be seen."""
    k, v = tokens.gather(torch.arange(tokens.length).expand(HEADS, -1))
    for head in range(HEADS):
        expected = {}
        for segment in wanted[head].nonzero()[:, 0].tolist():
            for i in range(int(segments.length[segment])):
                expected[int(segments.start[segment]) + i] = (int(segments.position[segment]) + i, segment)
        slots = (workspace.positions[head] != EMPTY).nonzero()[:, 0].tolist()
        assert sorted(workspace.tokens[head, slots].tolist()) == sorted(expected)
        for slot in slots:
            place = int(workspace.tokens[head, slot])
            assert (int(workspace.positions[head, slot]), int(workspace.segment[head, slot])) == expected[place]
            assert torch.equal(plain(workspace.k)[head, slot], k[head, place])
            assert torch.equal(plain(workspace.v)[head, slot], v[head, place])
        rest = [slot for slot in range(workspace.slots) if slot not in slots]
        assert (workspace.tokens[head, rest] == -1).all()
        assert (workspace.segment[head, rest] == -1).all()
        assert all(slot < workspace.extent for slot in slots)
    assert torch.isfinite(plain(workspace.k)).all()
    assert torch.isfinite(plain(workspace.v)).all()
    each = KEY + VALUE + 4 if len(workspace.rooms) == 4 else (KEY + VALUE) * 4
    assert workspace.nbytes == HEADS * workspace.slots * (each + 4)


STEPS = st.lists(
    st.tuples(st.lists(st.sets(st.integers(0, 7)), min_size=HEADS, max_size=HEADS), st.integers(0, 6), st.booleans()),
    max_size=8,
)
"""What each head wants, slots to spare (0: as many as are needed), and whether the step is of a fork."""


@given(STEPS, st.integers(0, 5), st.booleans())
@settings(max_examples=80, deadline=None)
def test_any_sequence_of_steps_holds_what_is_wanted_and_moves_what_is_missing(steps, new_segments, codes):
    """Ragged heads, allowances that grow and shrink, segments that are made later, forks that go their own way; numbers, and codes."""
    kinds = room_kinds(KEY, VALUE, torch.float32, codes=codes)
    workspace, before = Workspace(HEADS, kinds, CPU), [set() for _ in range(HEADS)]
    for number, (choices, spare, fork) in enumerate(steps):
        count = min(8, 3 + new_segments + number)
        tokens, segments = host(count, "int8" if codes else "raw")
        choices = [{segment for segment in own if segment < count} for own in choices]
        wanted = torch.zeros(HEADS, count, dtype=torch.bool)
        for head, own in enumerate(choices):
            wanted[head, list(own)] = True
        needed = int((wanted * segments.length).sum(1).max())
        went_on = workspace.clone() if fork else workspace
        before_it = [*workspace.rooms, workspace.positions, workspace.tokens, workspace.held]
        untouched = [x.clone() for x in before_it]
        moved, held = went_on.take(wanted, segments, tokens, needed + spare - 1 if spare else None)
        assert went_on.slots == (needed + spare - 1 if spare else needed)
        check(went_on, tokens, segments, wanted)
        sizes = [[int(LENGTHS[segment]) for segment in own] for own in choices]
        there = sum(int(LENGTHS[segment]) for own, old in zip(choices, before) for segment in own & old)
        assert (moved, held) == (sum(map(sum, sizes)) - there, there)
        if fork:
            for old, now in zip(untouched, before_it, strict=True):
                assert torch.equal(old, now)
        else:
            before = choices


def test_what_stays_keeps_its_slot_and_only_what_is_missing_is_read():
    tokens, segments = host(8)
    workspace = Workspace(HEADS, KINDS, CPU)
    wanted = torch.zeros(HEADS, 8, dtype=torch.bool)
    wanted[:, [0, 2, 5]] = True
    workspace.take(wanted, segments, tokens, 16)
    slots, memory = workspace.tokens.clone(), workspace.k.data_ptr()
    read, fill = [], tokens.fill
    tokens.fill = lambda rooms, at, index, heads: read.append(len(index)) or fill(rooms, at, index, heads)
    wanted = wanted.clone()
    wanted[:, 2], wanted[:, 3] = False, True
    assert workspace.take(wanted, segments, tokens, 16) == (HEADS * 2, HEADS * 8)
    assert read == [HEADS * 2]
    assert workspace.k.data_ptr() == memory
    stayed = (slots >= 0) & (slots != 4) & (slots != 5) & (slots != 6) & (slots != 7)
    assert torch.equal(workspace.tokens[stayed], slots[stayed])
    check(workspace, tokens, segments, wanted)


def test_tokens_that_wait_in_8_bits_are_written_as_they_are_read():
    tokens, segments = host(8, "int8")
    workspace = Workspace(HEADS, KINDS, CPU)
    wanted = torch.ones(HEADS, 8, dtype=torch.bool)
    workspace.take(wanted, segments, tokens)
    check(workspace, tokens, segments, wanted)


def test_codes_move_as_they_are(monkeypatch):
    """In C++ and without it; requantised, what the slots hold would be other bits."""
    tokens, segments = host(8, "int8")
    wanted = torch.ones(HEADS, 8, dtype=torch.bool)
    for in_cpp in (True, False):
        if not in_cpp:
            monkeypatch.setattr(host_pool, "copies_tokens", lambda *tensors: False)
        workspace = Workspace(HEADS, room_kinds(KEY, VALUE, torch.float32, codes=True), CPU)
        workspace.take(wanted, segments, tokens)
        check(workspace, tokens, segments, wanted)
        for room, name in zip(workspace.rooms, ("k", "v", "k_scale", "v_scale"), strict=True):
            for head in range(HEADS):
                slots = (workspace.tokens[head] >= 0).nonzero()[:, 0]
                assert torch.equal(room[head, slots], tokens.parts[name].data[head, workspace.tokens[head, slots]])


@pytest.mark.parametrize("size", [1, 4, 63])
def test_pieces_of_any_size_write_the_same_slots(monkeypatch, size):
    """Where there is no compiler."""
    monkeypatch.setattr(host_pool, "PIECE", size)
    monkeypatch.setattr(host_pool, "copies_tokens", lambda *tensors: False)
    tokens, segments = host(8, "int8")
    workspace = Workspace(HEADS, KINDS, CPU)
    wanted = torch.ones(HEADS, 8, dtype=torch.bool)
    read, gather = [], tokens.gather
    tokens.gather = lambda index, heads=None: read.append(len(index)) or gather(index, heads)
    assert workspace.take(wanted, segments, tokens) == (63, 0)
    assert sum(read) == 63
    assert max(read) == size
    check(workspace, tokens, segments, wanted)


def test_a_layout_comes_back_slot_by_slot():
    tokens, segments = host(8)
    workspace = Workspace(HEADS, KINDS, CPU)
    for chosen in ([0, 2, 5], [2, 3, 7], [1, 3, 7]):
        wanted = torch.zeros(HEADS, 8, dtype=torch.bool)
        wanted[:, chosen] = True
        wanted[1] = wanted[1].roll(1)
        workspace.take(wanted, segments, tokens, 15)
    again = Workspace(HEADS, KINDS, CPU)
    again.lay_out(workspace.tokens, workspace.segment, segments, tokens)
    check(again, tokens, segments, wanted)
    for name in ("tokens", "segment", "held", "positions"):
        assert torch.equal(getattr(again, name), getattr(workspace, name))
    assert again.take(wanted, segments, tokens, 15)[0] == 0


def test_more_than_fits_is_refused():
    tokens, segments = host(8)
    wanted = torch.ones(HEADS, 8, dtype=torch.bool)
    with pytest.raises(
        RuntimeError, match=r"segments of \[21, 21, 21\] tokens per KV head for 20 slots; choose what fits"
    ):
        Workspace(HEADS, KINDS, CPU).take(wanted, segments, tokens, 20)


def test_large_workspaces_change_in_steps_and_small_ones_exactly():
    assert [slots_within(tokens, 10_000) for tokens in (0.0, 0.9, 17.5, ROUND_FROM - 0.1)] == [0, 0, 17, ROUND_FROM - 1]
    assert [slots_within(tokens, 10_000) for tokens in (ROUND_FROM, 1087.9, 1088.0)] == [1024, 1024, 1088]
    assert slots_within(float("inf"), 100) == slots_within(5000.0, 100) == 2 * ROUND
    assert slots_within(100.0, 100) == 100
