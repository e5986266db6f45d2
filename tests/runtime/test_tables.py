"""Tables of folded units: layers that fold alike share them, and nobody else does."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv.runtime.store.segments import Cut
from semkv.runtime.store.tables import Tables
from semkv.runtime.text import Once


def tables_of(state) -> list[Tables]:
    return [memory.spans.tables for memory in state.rows[0].budgeted()]


@pytest.mark.parametrize(("method", "budget"), [("quest", 72), ("infllm", 0.4), ("sekv", 0.25)])
def test_layers_that_fold_alike_share_their_tables_and_forks_have_their_own(
    compile_as, wide_program, prompt, method, budget
):
    compiled = compile_as(wide_program, method, budget)
    state = compiled.prefill(prompt(300))
    ids, seen = prompt(90, seed=1), []
    for place in range(60):
        first, second = tables_of(state)
        assert first is second, place
        seen.append(first)
        compiled.extend(state, ids[:, place : place + 1])
    assert len(set(seen)) > 1, "nothing was folded"
    copy = state.fork()
    assert tables_of(copy) == tables_of(state)
    before, held = tables_of(state)[0], tables_of(state)[0].lengths.clone()
    for place in range(60, 90):
        compiled.extend(copy, ids[:, place : place + 1])
    assert tables_of(copy)[0] is tables_of(copy)[1]
    assert tables_of(state) == [before, before]
    assert torch.equal(before.lengths, held)
    for place in range(60, 90):
        compiled.extend(state, ids[:, place : place + 1])
    assert_same(tables_of(state)[0], tables_of(copy)[0])
    assert tables_of(state)[0] is not tables_of(copy)[0], "what forks fold later is theirs"


def test_units_that_a_layer_makes_of_its_keys_are_its_own(compile_as, wide_program, prompt):
    compiled = compile_as(wide_program, "clusterkv", 0.6)
    state = compiled.prefill(prompt(900))
    for place in range(20):
        compiled.extend(state, prompt(20, seed=1)[:, place : place + 1])
    first, second = tables_of(state)
    assert first is not second
    assert not torch.equal(first.segment_unit, second.segment_unit)


def assert_same(one: Tables, other: Tables) -> None:
    for name in (field.name for field in fields(Tables) if field.init and field.name not in ("retired", "shares")):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("fold"), st.lists(st.integers(1, 5), min_size=1, max_size=4)),
        st.tuples(st.just("join"), st.integers(0, 30)),
        st.tuples(st.just("archive"), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=12,
)


@given(changes=CHANGES)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_what_is_shared_is_what_one_store_makes_alone(changes):
    """Unit by unit, the tables are those of a list of runs of tokens; a second store that changes alike has the same objects."""
    alone, both, at = Tables.empty(), [Tables.empty()] * 2, 0
    runs: list[list[tuple[int, int]]] = []  # of each unit, (first token, tokens) of its segments
    for kind, value in changes:
        shared = Once()
        if kind == "fold":
            n = sum(value)
            cut = Cut(torch.arange(at, at + n), torch.arange(1.0, n + 1), torch.tensor(value))
            for length in value:
                runs.append([(at, length)])
                at += length
            alone = alone.folded(cut, 2, weighted=True, waits_from=at - n)
            both = [x.folded(cut, 2, weighted=True, waits_from=at - n, shared=shared) for x in both]
        elif kind == "join" and len(runs) > 1:
            left = value % (len(runs) - 1)
            runs[left : left + 2] = [runs[left] + runs[left + 1]]
            alone, both = alone.joined((left,)), [x.joined((left,), shared) for x in both]
        elif kind == "archive" and len(runs) > value:
            gone = [run for unit in runs[:value] for run in unit]
            runs = runs[value:]
            alone = alone.without_oldest(value)
            both = [x.without_oldest(value, shared) for x in both]
            assert alone.retired.tolist() == [[first, length, first] for first, length in gone]
        assert both[0] is both[1]
        assert both[0] is not alone
    assert_same(both[0], alone)
    sizes = [sum(length for _, length in unit) for unit in runs]
    assert alone.lengths.tolist() == [sizes]
    assert alone.unit_nbytes(7).tolist() == [[7 * size for size in sizes]]
    assert alone.unit_nbytes_range(7) == ((7 * min(sizes), 7 * max(sizes)) if sizes else (0, 0))
    flat = [(first, length, unit) for unit, own in enumerate(runs) for first, length in own]
    assert [list(x) for x in flat] == torch.stack(
        [alone.segment_position, alone.segment_length, alone.segment_unit[0]], 1
    ).tolist()
    assert alone.open_tokens(at) == (sizes[-1] if sizes else 0)
    assert alone.open_tokens(at + 1) == 0
    places = alone.places(at, torch.zeros(0, 3, dtype=torch.int64))
    for unit, own in enumerate(runs):
        tokens = torch.tensor([[place for first, length in own for place in range(first, first + length)]])
        assert places.units_of(tokens.int()).tolist() == [[unit] * tokens.shape[1]]
