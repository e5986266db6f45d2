"""The device never holds more than the budget, measured from the tensors that exist, and nothing raises after prefill."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semkv.errors import BudgetError
from tests.conftest import quick_ones

COMPRESSING = (
    "streaming_llm",
    "snapkv",
    "sekv",
    "h2o",
    "pyramidkv",
    "chunkkv",
    "cake",
    "semanticache",
    "compresskv",
)
SLOW = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def check(row, resident, folded) -> None:
    cap = row.cap_bytes(row.tokens)
    assert resident(row) <= cap
    assert resident(row) == row.device_nbytes()
    assert row.traffic.peak_share <= 1
    full = sum(row.placement.budget.full_bytes(store, row.tokens) for store in row.placement.budgeted)
    assert folded(row) <= 1.02 * full
    assert folded(row) == sum(memory.host_nbytes for memory in row.budgeted())


@given(
    method=st.sampled_from(COMPRESSING),
    budget=st.sampled_from([0.06, 0.1, 0.25, 0.8, 0.97, 24, 40, 57, 200]),
    page=st.sampled_from([1, 8, 8, 16]),
    length=st.integers(2, 600),
    chunk=st.sampled_from([1, 7, 40]),
)
@SLOW
def test_cap_over_prompts_and_chunks(
    wide_program, compile_as, prompt, resident, folded, method, budget, page, length, chunk
):
    settings = {"page_size": page, "kv_dtype": "float16", "extend_chunk": chunk}
    smallest = compile_as(wide_program, method, 0.5, **settings).placement.minimum_tokens
    if isinstance(budget, int) and budget < smallest:
        with pytest.raises(BudgetError, match=f"budget {budget} can never serve: .* needs at least {smallest} tokens"):
            compile_as(wide_program, method, budget, **settings)
        return
    compiled = compile_as(wide_program, method, budget, **settings)
    if not isinstance(budget, int) and budget * length < smallest:
        with pytest.raises(BudgetError, match=f"needs at least {smallest}"):
            compiled.prefill(prompt(length))
        return
    state = compiled.prefill(prompt(length))
    check(state.rows[0], resident, folded)
    for size in (1, 1, chunk, 3 * chunk, 1, 90):
        compiled.extend(state, prompt(size, seed=size))
        check(state.rows[0], resident, folded)


@pytest.mark.parametrize(
    "options",
    [
        {"forms": "factored", "max_rank": 4},
        {"forms": "raw"},
        {"bits": 8},
        {"routing": "mean", "router": "untrained"},
    ],
)
def test_cap_over_forms_of_folded_spans(wide_program, compile_as, prompt, resident, options):
    compiled = compile_as(wide_program, "sekv", 0.3, options=options, kv_dtype="float16")
    state = compiled.prefill(prompt(300))
    for step in range(30):
        compiled.extend(state, prompt(1, seed=step))
        row = state.rows[0]
        assert resident(row) <= row.cap_bytes(row.tokens)
    assert state.stats.peak_share <= 1
    assert state.stats.moved_bytes_per_step > 0


@pytest.mark.parametrize("method", quick_ones(COMPRESSING, ("sekv", "h2o")))
def test_generation_far_beyond_a_budget_in_tokens(wide_program, compile_as, prompt, resident, folded, method):
    """Spans merge, then old ones are archived; the host keeps every token."""
    compiled = compile_as(wide_program, method, 60, kv_dtype="float16")
    state = compiled.prefill(prompt(200))
    for step in range(60):
        compiled.extend(state, prompt(24, seed=step))
    check(state.rows[0], resident, folded)
    assert state.lengths == [200 + 60 * 24]
    if method == "sekv":
        memory = state.rows[0].stores[0][0]
        assert memory.kept.length + memory.recent.length + memory.spans.host_tokens.length == 200 + 60 * 24


def test_a_chunk_larger_than_the_budget_is_run_in_smaller_ones(wide_program, compile_as, prompt, resident):
    compiled = compile_as(wide_program, "snapkv", 48, kv_dtype="float16", extend_chunk=512)
    state = compiled.prefill(prompt(100))
    compiled.extend(state, prompt(300))
    row = state.rows[0]
    assert state.stats.steps > 300 / 48
    assert resident(row) <= row.cap_bytes(row.tokens)
    assert row.traffic.peak_share <= 1


def test_the_budget_of_every_row_is_its_own(wide_program, compile_as, prompt, resident):
    compiled = compile_as(wide_program, "sekv", 0.2, kv_dtype="float16")
    ids = prompt(400, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :150] = 0
    state = compiled.prefill(ids, mask)
    compiled.extend(state, prompt(1, rows=2))
    for row in state.rows:
        assert resident(row) <= row.cap_bytes(row.tokens)
    assert state.rows[0].cap_bytes(401) > state.rows[1].cap_bytes(251)
    assert state.full_bytes == sum(row.tokens for row in state.rows) * 2 * 2 * 2 * 64 * 2


def test_too_small_a_budget_says_the_smallest(wide_program, compile_as, prompt):
    compiled = compile_as(wide_program, "sekv", 0.1)
    with pytest.raises(
        BudgetError, match=r"budget 0\.1 leaves 10\.0 tokens .* needs at least 40: use budget=40 .* at least 0\.4 at"
    ):
        compiled.prefill(prompt(100))
    with pytest.raises(BudgetError, match="budget 100 can never serve: 'sekv' needs at least 320"):
        compile_as(wide_program, "sekv", 100, page_size=64)


def test_windowed_layers_are_not_counted(wide_program, compile_as, prompt):
    compiled = compile_as(wide_program, "streaming_llm", 0.5, kv_dtype="float16")
    state = compiled.prefill(prompt(200))
    assert [site.treatment for site in compiled.program.sites] == ["method", "window", "method"]
    memory = state.rows[0].stores[1][0]
    assert memory.kept.length == 0
    assert memory.recent.length == 8
    assert state.nbytes["window"] == memory.fixed_nbytes
    assert state.full_bytes == 200 * 2 * (2 * 2 * 64 * 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", COMPRESSING)
@pytest.mark.parametrize("budget", [0.05, 0.1, 0.2])
def test_4k_tokens_and_4k_generated(wide_program, compile_as, prompt, resident, folded, method, budget):
    compiled = compile_as(wide_program, method, budget, kv_dtype="float16")
    state = compiled.prefill(prompt(4096))
    row = state.rows[0]
    check(row, resident, folded)
    for step in range(4096):
        compiled.extend(state, state.logits.argmax(-1, keepdim=True))
        assert resident(row) <= row.cap_bytes(row.tokens), step
        if step % 64 == 0:
            check(row, resident, folded)
    check(row, resident, folded)


def test_a_store_whose_units_all_retired_has_no_slots(wide_program, compile_as, prompt, resident):
    """Slots of what was unfolded before do not stay on the device when no unit can be unfolded any more."""
    compiled = compile_as(wide_program, "sekv", 0.25, page_size=8, kv_dtype="float16")
    state = compiled.prefill(prompt(400))
    compiled.extend(state, prompt(3))
    (row,) = state.rows
    memories = [memory for memory in row.budgeted() if memory.reads_units]
    assert memories
    for memory in memories:
        assert memory.workspace_nbytes > 0
        memory._shrink(0.0, 1.0)
        assert memory.spans.count == memory.workspace_nbytes == 0
    compiled.extend(state, prompt(2))
    assert resident(row) == row.device_nbytes() <= row.cap_bytes(row.tokens)
