"""Rows that a fraction of the KV is too small for: exact up to the floor, held within it after, and counted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import semkv
from semkv.compiled import CompiledModel
from semkv.config import CompileConfig
from semkv.errors import ArtifactError, BudgetError, ConfigError
from semkv.methods import METHODS
from semkv.runtime.budgets.budget import Budget
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.state import State
from tests.conftest import quick_ones

FLOOR, FRACTION = 64, 0.2
SERVED = [name for name, kind in METHODS.items() if kind.compresses and not kind.needs_indexer]
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in SERVED}
OPTIONS |= {
    # by default they keep heads or layers whole, more than any fraction of this model
    "heterocache": ("heterocache", {"strict": True}),
    "omnikv": ("omnikv", {"strict": True}),
    "specontext, strict": ("specontext", {"strict": True}),
    "compresskv, recoverable": ("compresskv", {"recoverable": True}),
    "mixed, prior": ("mixed", {"prior": 0.2}),
}
DROPPING = ("streaming_llm", "snapkv", "h2o", "pyramidkv", "chunkkv", "cake", "compresskv")
HEADS = ("specontext", "specontext, strict", "mixed, prior")
"""Those that capture a retrieval head whenever they are compiled, which takes seconds."""
LIGHTLY = [pytest.param(name, marks=pytest.mark.slow if name in HEADS else ()) for name in OPTIONS]
QUICK = (
    "streaming_llm",
    "snapkv",
    "sekv",
    "quest",
    "clusterkv",
    "sketch",
    "h2o",
    "chunkkv",
    "compresskv, recoverable",
    "sentencekv",
    "heterocache",
)
"""One of each kind, where all are many; the others run with the slow tests."""
LENGTHS = (1, 3, 17, 40, 41, 49, 57, 73, 90, 121, 200, 400)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def made(tiny):
    """`made(name, budget, **settings) -> CompiledModel`, each once."""
    known: dict[Any, CompiledModel] = {}

    def make(name: str, budget: float | int = FRACTION, **settings: Any) -> CompiledModel:
        key = (name, budget, *sorted(settings.items()))
        if key not in known:
            method, options = OPTIONS[name]
            config = CompileConfig(**{"floor": FLOOR, **settings})
            known[key] = tiny.with_method(method, budget, config=config, **options)
        return known[key]

    return make


@pytest.fixture(scope="module")
def text(random_ids) -> Tensor:
    return random_ids(400, 7)[None]


@pytest.fixture(scope="module")
def exact(tiny, text) -> Tensor:
    """Logits of `full` after each of the first 340 tokens: [340, vocab]."""
    state = tiny.prefill(text[:, :1])
    return torch.cat([state.logits, tiny.extend(state, text[:, 1:340], all_logits=True)[0]])


@pytest.fixture(scope="module")
def records(tiny, text):
    """Prompts of `LENGTHS` that were read once, for every method."""
    return {n: tiny.prefill_record(text[:, :n], surprisal=True, all_queries=True) for n in LENGTHS}


def held(row: RowMemory) -> int:
    return row.device_nbytes() + row.charged_nbytes


def positions(row: RowMemory, store: int) -> list[set[int]]:
    """Per KV head, the tokens that a row holds exactly in one store."""
    heads = row.placement.stores[store].kv_heads
    found: list[set[int]] = [set() for _ in range(heads)]
    for memory in row.stores[store]:
        for part in (memory.kept, memory.recent):
            for head, own in enumerate(part.positions.expand(memory.site.kv_heads, -1).tolist()):
                found[memory.site.first_head + head] |= set(own)
    return found


def flipped(one: RowMemory, other: RowMemory) -> bool:
    """Whether a number of a folded token, computed in another order, fell on the other side of a step of its 8-bit code: by one step."""
    found = False
    for mine, theirs in zip(one.memories(), other.memories()):
        waiting = {} if mine.spans is None else mine.spans.host_tokens.parts
        for name, part in waiting.items():
            n = mine.spans.host_tokens.length
            a, b = (x.data[:, :n] for x in (part, theirs.spans.host_tokens.parts[name]))
            if a.dtype == torch.uint8 and not torch.equal(a, b):
                found = True
                assert int((a.int() - b.int()).abs().max()) == 1
    return found


# -- below the floor, across it, beyond it -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.slow
def test_short_rows_of_a_batch_are_exact_and_leave_their_neighbours_alone(made, text, exact, name):
    compiled, lengths = made(name), (1, 2, 7, 8, 9, 31, 37, 130)
    ids, mask = torch.zeros(len(lengths), 130, dtype=torch.int64), torch.zeros(len(lengths), 130, dtype=torch.int64)
    for row, n in enumerate(lengths):
        ids[row, 130 - n :], mask[row, 130 - n :] = text[0, :n], 1
    state, alone = compiled.prefill(ids, mask), compiled.prefill(text[:, :130])
    assert state.stats.short_rows == 7 + (compiled.placement.budget.in_force_from > 130)
    for step in range(3):
        made_of = torch.stack([text[0, n + step] for n in lengths])[:, None]
        logits = compiled.extend(state, made_of)[:, 0]
        for row, n in enumerate(lengths[:-1]):
            torch.testing.assert_close(logits[row], exact[n + step], **CLOSE)
        torch.testing.assert_close(logits[-1], compiled.extend(alone, text[:, 130 + step : 131 + step])[0, 0], **CLOSE)
    assert [row.exact for row in state.rows] == [True] * 7 + [compiled.placement.budget.floor >= 130]
    assert all(held(row) <= row.whole_cap(row.tokens) for row in state.rows)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_row_that_grows_is_exact_up_to_the_floor_and_within_it_after(made, text, exact, name):
    compiled = made(name)
    floor = compiled.placement.budget.floor
    state = compiled.prefill(text[:, :3])
    first = compiled.extend(state, text[:, 3 : floor - 6], all_logits=True)[0]
    torch.testing.assert_close(first, exact[3 : floor - 6], **CLOSE)
    for at in range(floor - 6, floor + 26):
        logits = compiled.extend(state, text[:, at : at + 1])[0, 0]
        row = state.rows[0]
        assert row.exact == (row.tokens <= floor)
        assert held(row) <= row.whole_cap(row.tokens) == row.whole_cap(floor)
        assert bool(logits.isfinite().all())
        if row.exact:
            torch.testing.assert_close(logits, exact[at], **CLOSE)
    later = compiled.extend(state, text[:, floor + 26 : floor + 90], all_logits=True)[0]
    assert bool(later.isfinite().all())
    # The control: beyond the floor something is compressed, or the comparison above could not fail.
    assert float((later - exact[floor + 26 : floor + 90]).abs().max()) > 1e-3
    assert 0.5 < state.stats.peak_share <= 1


@pytest.mark.parametrize("name", quick_ones(OPTIONS, QUICK))
def test_the_method_takes_over_as_it_would_a_prompt(made, tiny, text, name):
    """What a row holds when it has outgrown the floor is what the method makes of the same tokens read at once."""
    compiled = made(name)
    floor, placement = compiled.placement.budget.floor, compiled.placement
    state = compiled.prefill(text[:, :5])
    compiled.extend(state, text[:, 5:floor])
    record = compiled.prefill_record(text[:, :floor])
    record.going_on = True
    read = object.__new__(RowMemory)
    read._make(placement, record.ordered_for(compiled.program), {}, release=False)
    other = State(placement, [read], record.logits[None])
    for at in range(floor, floor + 6):
        both = [compiled.extend(one, text[:, at : at + 1]) for one in (state, other)]
        near = 1e-2 if flipped(state.rows[0], read) else 1e-3
        torch.testing.assert_close(both[0], both[1], rtol=near, atol=near)
        for store in placement.stores:
            assert positions(state.rows[0], store) == positions(read, store)


@pytest.mark.parametrize("name", DROPPING)
def test_nothing_is_dropped_at_the_crossing_but_what_is_over_the_cap(made, text, name):
    compiled = made(name)
    state = compiled.prefill(text[:, :1])
    compiled.extend(state, text[:, 1 : FLOOR + 1])
    page = compiled.settings.page_size
    for store in compiled.placement.stores:
        for kept in positions(state.rows[0], store):
            assert FLOOR in kept
            assert len(kept) >= FLOOR + 1 - page


def test_streaming_llm_has_its_sinks_from_a_prompt_of_one_token(made, text):
    compiled = made("streaming_llm")
    state = compiled.prefill(text[:, :1])
    compiled.extend(state, text[:, 1:200])
    for kept in positions(state.rows[0], 0):
        assert {0, 1, 2, 3} <= kept
        assert set(range(160, 200)) <= kept
        assert not kept & set(range(8, 120))


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "cake", "compresskv", "h2o"])
def test_half_of_what_a_grown_row_holds_is_its_newest(made, text, name):
    compiled = made(name)
    state = compiled.prefill(text[:, :1])
    compiled.extend(state, text[:, 1:200])
    for kept in positions(state.rows[0], 1):
        assert set(range(200 - FLOOR // 2 + 8, 200)) <= kept
        assert kept & set(range(FLOOR))


@pytest.mark.parametrize("name", ["sekv", "snapkv", "h2o", "specontext", "heterocache"])
def test_a_chunk_across_the_crossing_is_one_that_stops_there(made, text, name):
    compiled = made(name)
    floor = compiled.placement.budget.floor
    once, twice = (compiled.prefill(text[:, :9]) for _ in range(2))
    logits = compiled.extend(once, text[:, 9 : floor + 80], all_logits=True)
    parts = [
        compiled.extend(twice, text[:, start:end], all_logits=True) for start, end in ((9, floor), (floor, floor + 80))
    ]
    torch.testing.assert_close(logits, torch.cat(parts, 1), **CLOSE)
    assert bool(logits.isfinite().all())
    assert held(once.rows[0]) <= once.rows[0].whole_cap(floor + 80)


@pytest.mark.parametrize("name", ["sekv", "streaming_llm", "quest", "mixed"])
def test_rows_that_cross_at_other_times_are_each_as_if_alone(made, text, random_ids, name):
    compiled = made(name)
    ids = torch.stack([text[0, :150], random_ids(150, 8), random_ids(150, 9)])
    lengths = (20, 55, 150)
    mask = torch.stack([torch.arange(150) < n for n in lengths]).long()
    more = torch.stack([random_ids(70, 20 + row) for row in range(3)])
    state = compiled.prefill(ids * mask, mask)
    logits = compiled.extend(state, more, all_logits=True)
    for row, n in enumerate(lengths):
        alone = compiled.prefill(ids[row : row + 1, :n])
        torch.testing.assert_close(
            logits[row], compiled.extend(alone, more[row : row + 1], all_logits=True)[0], **CLOSE
        )


def test_generation_from_a_short_prompt_is_that_of_full(made, tiny, text):
    for name in ("sekv", "snapkv", "specontext"):
        theirs, ours = (
            c.generate(text[:, :7], max_new_tokens=40, do_sample=False, pad_token_id=0) for c in (tiny, made(name))
        )
        assert ours.tolist() == theirs.tolist()


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIGHTLY)
def test_the_whole_kv_keeps_every_token(made, text, exact, name):
    compiled = made(name, 1.0, floor=0)
    state = compiled.prefill(text[:, :90])
    logits = torch.cat([state.logits, compiled.extend(state, text[:, 90:180], all_logits=True)[0]])
    torch.testing.assert_close(logits, exact[89:180], **CLOSE)
    assert state.rows[0].exact
    assert state.stats.peak_share <= 1
    assert state.nbytes["floor"] == state.stats.short_rows == 0


@pytest.mark.parametrize("name", ["streaming_llm", "sekv", "quest", "sketch", "h2o"])
def test_without_a_floor_short_rows_are_refused(made, text, name):
    compiled = made(name, floor=0)
    with pytest.raises(BudgetError, match=r"needs (at least )?\d+"):
        compiled.prefill(text[:, :9])
    assert compiled.placement.budget.in_force_from == 0
    assert compiled.prefill(text).rows[0].is_short is False


@pytest.mark.parametrize("name", LIGHTLY)
def test_no_length_is_refused_with_the_smallest_floor(made, records, name):
    compiled = made(name, floor=1)
    for n, record in records.items():
        row = compiled.compress(record).rows[0]
        assert held(row) <= row.whole_cap(n)
        if not row.exact:
            row._check_reach()


REFUSED = {
    "tokens below the smallest": (
        "snapkv",
        {},
        23,
        r"budget 23 can never serve: 'snapkv' needs at least 24 .* use budget=24",
    ),
    "of the largest smallest": ("infllm", {}, 95, r"'infllm' needs at least 96 .* use budget=96"),
    "of heads of their own": ("sketch", {}, 23, r"'sketch' needs at least 24 .* use budget="),
    "an index of every token in tokens": (
        "specontext",
        {},
        300,
        r"budget 300 is a number of tokens.*give a fraction.*or strict=True",
    ),
    "whole heads in tokens": ("omnikv", {}, 300, r"budget 300 is a number of tokens.*keeps every token of some heads"),
    "an index above the fraction": (
        "specontext",
        {},
        0.1,
        r"budget 0\.1 can never serve: .*'specontext' keeps 12\.5%.*of at least 0\.1",
    ),
    "whole heads above the fraction": (
        "omnikv",
        {},
        0.5,
        r"'omnikv' keeps 100\.0%.*use 1\.0, which keeps every token, or strict=True",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_budgets_that_can_never_serve_are_refused_when_compiling(tiny, case):
    method, options, budget, message = REFUSED[case]
    with pytest.raises(BudgetError, match=message):
        tiny.with_method(method, budget, config=CompileConfig(floor=FLOOR), **options)


def test_the_smallest_budget_that_a_refusal_names_serves(tiny, text):
    for method, budget in (("snapkv", 24), ("sekv", 40), ("specontext", 0.165)):
        compiled = tiny.with_method(method, budget, config=CompileConfig(floor=FLOOR))
        for n in (1, 30, 150):
            compiled.prefill(text[:, :n])


def test_a_fraction_below_an_index_serves_where_the_floor_holds_it_at_every_length(made, tiny, text):
    """The index of the longest row, 1,024 tokens, is 128 tokens: within 256, not within 64."""
    compiled = made("specontext", 0.1, floor=256)
    assert compiled.placement.budget.floor == 256
    state = compiled.prefill(text)
    compiled.extend(state, torch.cat([text, text[:, :220]], 1))
    assert held(state.rows[0]) <= state.rows[0].whole_cap(1020)


def test_a_floor_is_none_for_a_number_of_tokens(tiny, text):
    compiled = tiny.with_method("snapkv", 24, config=CompileConfig())
    assert compiled.placement.budget.floor == 0
    assert compiled.prefill(text[:, :100]).nbytes["device"] <= 24 * compiled.placement.budget.full_bytes(
        compiled.program.stores[0], 1
    ) * len(compiled.program.stores)


def test_the_cap_never_shrinks_and_is_the_larger_of_the_two(tiny):
    stores = tiny.with_method("snapkv", 0.1).placement.budgeted
    budget, strict = Budget(0.1, torch.float32, 64), Budget(0.1, torch.float32)
    caps = [budget.cap_bytes(stores, n) for n in range(1, 2000)]
    assert caps == sorted(caps)
    for n, cap in enumerate(caps, 1):
        assert cap >= strict.cap_bytes(stores, n)
        assert cap >= sum(budget.full_bytes(store, min(n, 64)) for store in stores)
        assert budget.average_tokens(n) == max(64, 0.1 * n)
    assert caps[0] == caps[639] < caps[-1] == strict.cap_bytes(stores, 1999)
    assert (budget.in_force_from, strict.in_force_from) == (640, 0)
    assert [budget.exact(n) for n in (1, 64, 65)] == [True, True, False]
    assert [strict.exact(n) for n in (1, 64)] == [False, False]


@pytest.mark.parametrize("floor", [-1, 2.5, "many"])
def test_a_floor_is_a_number_of_tokens(floor):
    with pytest.raises(ConfigError, match="floor"):
        CompileConfig(floor=floor)


def test_a_floor_is_raised_to_what_the_method_needs_in_whole_pages(made):
    assert made("streaming_llm", floor=1).placement.budget.floor == 32
    assert made("infllm", floor=1).placement.budget.floor > 96
    assert made("streaming_llm", floor=100).placement.budget.floor == 104
    assert made("streaming_llm", floor=100, page_size=64).placement.budget.floor == 256  # a margin above three pages
    assert (
        made("specontext", 0.165, floor=1).placement.budget.floor
        > made("specontext", 0.5, floor=1).placement.budget.floor
    )


# -- what is counted, and what lives on --------------------------------------------------------------------------------


def test_what_the_floor_costs_is_counted_and_explained(made, text):
    compiled = made("snapkv")
    state = compiled.prefill(text[:, :40])
    strict = compiled.placement.budget.strict_bytes(compiled.placement.budgeted, 40)
    assert state.nbytes["floor"] == state.nbytes["device"] - strict > 0
    assert state.nbytes["host"] == state.rows[0].past.nbytes > 0
    assert state.stats.short_rows == 1
    long = compiled.prefill(text)
    assert (long.nbytes["floor"], long.stats.short_rows) == (0, 0)
    assert compiled.placement.budget.in_force_from == math.ceil(FLOOR / FRACTION) == 320
    said = semkv.explain(compiled)
    assert "rows of up to 64 tokens are exact; from 320 tokens on the fraction is in force" in " ".join(said.split())
    assert "no floor" in semkv.explain(made("snapkv", floor=0))
    assert "every token of every row is exact" in semkv.explain(made("snapkv", 1.0, floor=0))


@pytest.mark.parametrize("name", ["sekv", "h2o", "snapkv", "specontext", "heterocache"])
@pytest.mark.slow
def test_copies_and_files_of_short_rows_cross_as_the_row_does(made, text, tmp_path: Path, name):
    compiled = made(name)
    floor = compiled.placement.budget.floor
    state = compiled.prefill(text[:, :9])
    compiled.extend(state, text[:, 9:30])
    state.save(tmp_path / "short.state")
    others = [state.fork(), state.select([0]), compiled.load_state(tmp_path / "short.state")]
    expected = compiled.extend(state, text[:, 30 : floor + 20])
    for other in others:
        assert other.lengths == [30]
        torch.testing.assert_close(compiled.extend(other, text[:, 30 : floor + 20]), expected, **CLOSE)
    state.save(tmp_path / "grown.state")
    again = compiled.load_state(tmp_path / "grown.state")
    assert not again.rows[0].exact
    more = text[:, floor + 20 : floor + 24]
    torch.testing.assert_close(compiled.extend(again, more), compiled.extend(state, more), **CLOSE)
    with pytest.raises(ArtifactError, match="compile with the same settings"):
        made(name, floor=0).load_state(tmp_path / "short.state")


def test_an_artifact_keeps_its_floor(made, text, tmp_path: Path):
    compiled = made("streaming_llm", floor=48)
    compiled.save(tmp_path / "model")
    again = semkv.load(tmp_path / "model")
    assert (again.settings.floor, again.placement.budget) == (48, compiled.placement.budget)
    first, second = (c.prefill(text[:, :9]) for c in (compiled, again))
    torch.testing.assert_close(compiled.extend(first, text[:, 9:70]), again.extend(second, text[:, 9:70]), **CLOSE)


def test_a_takeover_that_fails_leaves_the_row_as_it_was(made, text, monkeypatch):
    compiled = made("snapkv")
    state = compiled.prefill(text[:, :FLOOR])
    monkeypatch.setattr(RowMemory, "_check_budget", lambda self: (_ for _ in ()).throw(BudgetError("not now")))
    with pytest.raises(BudgetError, match="not now"):
        compiled.extend(state, text[:, FLOOR : FLOOR + 1])
    monkeypatch.undo()
    state.check_whole()
    assert (state.lengths, state.rows[0].exact) == ([FLOOR], True)
    fresh = compiled.prefill(text[:, :FLOOR])
    more = text[:, FLOOR : FLOOR + 5]
    torch.testing.assert_close(compiled.extend(state, more), compiled.extend(fresh, more), **CLOSE)


def test_the_quickstarts_first_prompt_is_served():
    """A prompt of a few tokens at 10 %, by the defaults: what it says is what the whole KV says."""
    model, tokenizer = semkv.bundled.load()
    compiled = semkv.compile(model, semkv.bundled.profile(), method="sekv", budget=0.10)
    assert compiled.settings.floor == compiled.placement.budget.floor == 256
    batch = tokenizer(["The garden behind the house"], return_tensors="pt")
    full = compiled.with_method("full")
    ours, theirs = (
        c.generate(batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=12, do_sample=False)
        for c in (compiled, full)
    )
    assert ours.tolist() == theirs.tolist()
