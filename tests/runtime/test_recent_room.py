"""What evicting methods hold of the newest tokens within a budget: pages leave whole, but for the only one."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({"window": 8}, 8, 8),  # the only page stays full: no token evicts the window
        ({"window": 16}, 9, 16),
        ({"window": 32}, 25, 32),
    ],
)
def test_the_newest_tokens_stay(wide_program, compile_as, prompt, options, least, most):
    compiled = compile_as(wide_program, "snapkv", 80, options=options, kv_dtype="float16", page_size=8)
    state = compiled.prefill(prompt(300))
    memory = state.rows[0].stores[0][0]
    kept = memory.kept.positions.clone()
    lengths = []
    for at in range(40):
        compiled.extend(state, prompt(1, seed=at))
        now, memory = 301 + at, state.rows[0].stores[0][0]
        positions = memory.recent.positions[0].tolist()
        assert positions == list(range(now - len(positions), now))
        lengths.append(len(positions))
    assert (min(lengths), max(lengths)) == (least, most)
    assert memory.kept.positions.equal(kept)
    assert state.stats.peak_share <= 1


def test_a_chunk_leaves_what_is_newest(wide_program, compile_as, prompt):
    compiled = compile_as(wide_program, "snapkv", 80, options={"window": 8}, kv_dtype="float16", page_size=8)
    state = compiled.prefill(prompt(300))
    for size in (3, 8, 5, 1, 20):
        compiled.extend(state, prompt(size, seed=size))
        positions = state.rows[0].stores[0][0].recent.positions[0].tolist()
        assert positions == list(range(state.lengths[0] - 8, state.lengths[0]))
