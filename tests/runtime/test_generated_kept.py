"""`generated="kept"`: the budget is the prompt's, and every token that follows stays exact; against masked attention."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from semkv.errors import ArtifactError, ConfigError
from semkv.methods import METHODS, find_method
from semkv.runtime.snapshot import row_from_tensors, row_to_tensors
from tests.conftest import quick_ones, rotate

EVICTING = ("snapkv", "pyramidkv", "chunkkv", "cake", "compresskv")
KEPT = {"generated": "kept"}
LENGTHS = (203, 131, 170)


def attended(row, decoder) -> list[list[set[int]]]:
    """Per layer and KV head, the prompt's positions that a row holds."""
    found = []
    for number, layer in enumerate(decoder.layers):
        (memory,) = row.stores[number]
        recent = memory.recent.positions[0].tolist()
        kept = memory.kept.positions.expand(layer.kv_heads, -1).tolist()
        found.append([{*own, *recent} for own in kept])
    return found


def reference(decoder, ids: Tensor, prompt: int, held: list[list[set[int]]]) -> Tensor:
    """Logits [n, vocab] of ids [n]: queries of the prompt see all before them, later ones what `held` says of the prompt and all after
    it."""
    n = len(ids)
    positions = torch.arange(n)[None]
    x = decoder.embed(ids)[None]
    for number, layer in enumerate(decoder.layers):
        y = layer.norm(x)
        q = rotate(layer.q(y).view(1, n, layer.heads, layer.dim).transpose(1, 2), positions)[0]
        k = rotate(layer.k(y).view(1, n, layer.kv_heads, layer.dim).transpose(1, 2), positions)[0]
        v = layer.v(y).view(n, layer.kv_heads, layer.dim).transpose(0, 1)
        seen = torch.ones(layer.heads, n, n, dtype=torch.bool).tril()
        if layer.window:
            seen &= ~torch.ones(n, n, dtype=torch.bool).tril(-layer.window)
        else:
            for head in range(layer.heads):
                kept = held[number][head * layer.kv_heads // layer.heads]
                seen[head, prompt:, [j for j in range(prompt) if j not in kept]] = False
        k, v = (part.repeat_interleave(layer.heads // layer.kv_heads, 0) for part in (k, v))
        weights = (q @ k.transpose(1, 2) / math.sqrt(layer.dim)).masked_fill(~seen, float("-inf")).softmax(-1)
        out = (weights @ v).transpose(0, 1)
        x = x + layer.o(out.reshape(1, n, -1))
        x = x + layer.down(torch.nn.functional.gelu(layer.up(layer.mlp_norm(x))))
    return decoder.lm_head(decoder.norm(x))[0]


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    ids = torch.stack([torch.cat([row.new_zeros(longest - len(row)), row]) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).long()
    return ids, mask


def told(compiled, state, ids: Tensor) -> list[Tensor]:
    """Logits [B, vocab] after each of ids [B, T], one step each."""
    return [compiled.extend(state, ids[:, at : at + 1])[:, -1] for at in range(ids.shape[1])]


@pytest.mark.parametrize("method", quick_ones(EVICTING, ["snapkv", "chunkkv", "compresskv"]))
def test_a_ragged_batch_attends_to_what_is_kept_and_all_that_follows(
    decoder, double_program, compile_as, prompt, method
):
    """A question in one piece, 45 tokens one by one, a second turn, and a few more."""
    compiled = compile_as(double_program, method, 0.3, options=KEPT, kv_dtype="float64")
    rows = [prompt(length, seed=length)[0] for length in LENGTHS]
    state = compiled.prefill(*padded(rows))
    held = [attended(row, decoder) for row in state.rows]
    for length, own in zip(LENGTHS, held):
        assert all(0 < len(head) < 0.7 * length for layer in (own[0], own[2]) for head in layer)
    question, answer, turn, more = (prompt(n, rows=3, seed=n) for n in (11, 45, 9, 4))
    first = compiled.extend(state, question)[:, -1]
    logits = [first, *told(compiled, state, answer), compiled.extend(state, turn)[:, -1], *told(compiled, state, more)]
    follows = torch.cat([question, answer, turn, more], 1)
    places = [10, *range(11, 56), 64, *range(65, 69)]
    for number, row in enumerate(rows):
        expected = reference(decoder, torch.cat([row, follows[number]]), len(row), held[number])
        for place, got in zip(places, logits, strict=True):
            torch.testing.assert_close(got[number], expected[len(row) + place], rtol=1e-9, atol=1e-9)
        later = set(range(len(row), len(row) + 69))
        now = attended(state.rows[number], decoder)
        assert all(now[layer] == [head | later for head in held[number][layer]] for layer in (0, 2))


def test_without_it_the_same_text_is_answered_otherwise(decoder, double_program, compile_as, prompt):
    """The control: the budget's own mode forgets, so that the reference above can fail."""
    row, answer = prompt(203, seed=203), prompt(45, seed=45)
    logits = {}
    for mode in ("kept", "budgeted"):
        compiled = compile_as(double_program, "snapkv", 0.3, options={"generated": mode}, kv_dtype="float64")
        state = compiled.prefill(row)
        logits[mode] = told(compiled, state, answer)[-1]
        assert (state.stats.peak_share > 1) == (mode == "kept")
    assert (logits["kept"] - logits["budgeted"]).abs().max() > 1e-3


@pytest.mark.parametrize("budget", [0.3, 48])
def test_the_excess_is_measured(wide_program, compile_as, prompt, resident, budget):
    compiled = compile_as(wide_program, "snapkv", budget, options=KEPT, kv_dtype="float16")
    state = compiled.prefill(prompt(300, rows=2))
    assert (state.nbytes["excess"], state.stats.excess_share) == (0, 0.0)
    over, ratios = [], []
    for at in range(70):
        compiled.extend(state, prompt(1, rows=2, seed=at))
        row = state.rows[1]
        full = compiled.placement.budget.full_bytes(row.placement.budgeted[0], row.tokens)
        cap, memory = row.cap_bytes(row.tokens) / 2, row.stores[0][0]
        held = memory.kept.nbytes + memory.recent.nbytes
        exact = sum(x.nbytes for part in (memory.kept, memory.recent) for x in part.to_tensors().values())
        assert exact <= held < exact + 2 * memory.page_nbytes
        assert 2 * held <= resident(row)
        over.append(max(0.0, held - cap) / full)
        ratios.append(held / cap)
    stats = state.stats
    assert stats.excess_share == pytest.approx(max(over), rel=1e-3)
    assert stats.excess_share > 0.03
    assert stats.excess_share_mean == pytest.approx(sum(over) / 70, rel=0.05)
    assert state.nbytes["excess"] == pytest.approx(4 * (held - cap), abs=4)  # two rows of two layers
    assert stats.peak_share == pytest.approx(max(ratios), rel=1e-3)
    assert stats.device_share >= held / full
    assert stats.attended_share_mean <= stats.device_share_mean


def test_within_the_budget_there_is_no_excess(wide_program, compile_as, prompt):
    compiled = compile_as(wide_program, "snapkv", 0.3, kv_dtype="float16")
    state = compiled.prefill(prompt(300))
    told(compiled, state, prompt(50))
    assert (state.nbytes["excess"], state.stats.excess_share, state.stats.excess_share_mean) == (0, 0.0, 0.0)


@pytest.mark.parametrize("length", [40, 64, 100])
def test_short_prompts_stay_exact_for_good(decoder, double_program, compile_as, prompt, length):
    """A prompt within the floor is held whole, and nothing that follows evicts it."""
    compiled = compile_as(double_program, "snapkv", 0.2, options=KEPT, kv_dtype="float64", floor=64)
    row, answer = prompt(length, seed=1), prompt(90, seed=2)
    state = compiled.prefill(row)
    held = attended(state.rows[0], decoder)
    assert (held[0][0] == set(range(length))) == (length <= 64)
    logits = told(compiled, state, answer)
    expected = reference(decoder, torch.cat([row[0], answer[0]]), length, held)
    for place, got in enumerate(logits):
        torch.testing.assert_close(got[0], expected[length + place], rtol=1e-9, atol=1e-9)
    assert state.nbytes["excess"] > 0
    assert state.nbytes["floor"] + state.nbytes["excess"] <= state.nbytes["device"]


def test_rows_that_are_exact_and_rows_that_are_not_share_a_batch(wide_program, compile_as, prompt):
    """Each as it is alone, a question in pieces and a turn behind it."""
    compiled = compile_as(wide_program, "snapkv", 0.3, options=KEPT, floor=48, extend_chunk=7)
    rows = [prompt(n, seed=n)[0] for n in (40, 150, 90)]
    state, alone = compiled.prefill(*padded(rows)), [compiled.prefill(row[None]) for row in rows]
    assert [row.exact for row in state.rows] == [True, False, False]
    for size in (17, 1, 1, 30):
        ids = prompt(size, rows=3, seed=size)
        logits = compiled.extend(state, ids)[:, -1]
        for number, own in enumerate(alone):
            torch.testing.assert_close(
                logits[number], compiled.extend(own, ids[number : number + 1])[0, -1], rtol=1e-4, atol=1e-5
            )
    assert [row.exact for row in state.rows] == [True, False, False]


def test_forks_and_files_go_on_alike(wide_program, compile_as, prompt, tmp_path):
    compiled = compile_as(wide_program, "cake", 0.3, options=KEPT, floor=48)
    state = compiled.prefill(*padded([prompt(n, seed=n)[0] for n in (40, 150)]))
    told(compiled, state, prompt(30, rows=2))
    state.save(tmp_path / "state")
    others = [state.fork(), compiled.load_state(tmp_path / "state"), state.select([0, 1])]
    more = prompt(25, rows=2, seed=9)
    expected = torch.stack(told(compiled, state, more))
    for other in others:
        assert torch.equal(torch.stack(told(compiled, other, more)), expected)
        assert other.nbytes["excess"] == state.nbytes["excess"] > 0
        assert [row.prompt for row in other.rows] == [40, 150]
    budgeted = compile_as(wide_program, "cake", 0.3, floor=48)
    with pytest.raises(ArtifactError, match="generated"):
        budgeted.load_state(tmp_path / "state")


def test_a_file_that_lost_tokens_is_refused(wide_program, compile_as, prompt):
    compiled = compile_as(wide_program, "snapkv", 0.3, options=KEPT)
    state = compiled.prefill(prompt(150))
    told(compiled, state, prompt(60))
    facts, tensors = row_to_tensors(state.rows[0])
    for wrong, said in (
        ({"prompt": 0}, "a prompt of 0 tokens in a row of 210"),
        ({"prompt": 20}, "recent tokens, of which 190 followed"),
    ):
        with pytest.raises(ValueError, match=said):
            row_from_tensors(compiled.placement, facts | wrong, tensors)


def test_beams_keep_what_they_generated(wide_program, compile_as, prompt):
    """Two beams that are the same row go on as that row does."""
    compiled = compile_as(wide_program, "snapkv", 0.3, options=KEPT)
    state = compiled.prefill(prompt(150, rows=2))
    told(compiled, state, prompt(30, rows=2))
    alone = state.select([1])
    state.reorder_cache(torch.tensor([1, 1]))
    more = prompt(20, seed=4)
    expected = torch.stack(told(compiled, alone, more))[:, 0]
    got = torch.stack(told(compiled, state, more.expand(2, -1)))
    torch.testing.assert_close(got[:, 0], expected)
    torch.testing.assert_close(got[:, 1], expected)


def test_rooms_grow_by_pages_and_seldom(wide_program, compile_as, prompt):
    compiled = compile_as(wide_program, "snapkv", 0.3, options=KEPT, page_size=8)
    state = compiled.prefill(prompt(400))
    seen = set()
    for at in range(64):
        compiled.extend(state, prompt(1, seed=at))
        store = state.rows[0].stores[0][0].recent
        (capacity,) = {x.shape[1] for x in store.buffers}
        assert capacity % 8 == 0
        assert store.length <= capacity
        seen.add(capacity)
    assert len(seen) < 8
    assert state.nbytes["reserved"] > 0


@pytest.mark.parametrize("name", METHODS)
def test_methods_without_the_option_refuse_it_by_name(name):
    offers = name in (*EVICTING, "heterocache", "sentencekv")
    if offers:
        assert find_method(name, KEPT).generated == "kept"
        with pytest.raises(
            ConfigError, match=f"option 'generated' of method '{name}' is 'some'; expected one of 'budgeted', 'kept'"
        ):
            find_method(name, {"generated": "some"})
        return
    with pytest.raises(ConfigError, match=f"method '{name}' has no option 'generated'.*compress a prompt once"):
        find_method(name, KEPT)


FOLDING = {
    "sentencekv": ("sentencekv", 0.4, {}),
    "compresskv, recoverable": ("compresskv", 0.4, {"recoverable": True}),
    "heterocache": ("heterocache", 0.8, {"tau_similar": 0.05, "tau_stable": 0.001, "every": 2, "tau_drift": 0.9}),
}


@pytest.mark.parametrize("case", FOLDING)
def test_methods_that_fold_fold_the_prompt_alone(tiny, random_ids, case):
    """What follows is in no unit, no unit loses room to it, and what unfolds still changes."""
    method, budget, options = FOLDING[case]
    compiled = tiny.with_method(method, budget=budget, **options, **KEPT)
    state = compiled.prefill(random_ids(180, 1)[None])
    row = state.rows[0]
    folds = [memory for memory in row.budgeted() if memory.spans is not None]
    assert folds
    units = [memory.spans.count for memory in folds]
    room = [row.workspace_allowance(store, row.tokens) for store in row.placement.budgeted]
    unfolded = []
    for at in range(60):
        compiled.extend(state, random_ids(1, at)[None])
        unfolded.append([memory.slots.places.sort().values for memory in folds])
    later = set(range(180, 240))
    for memory in row.budgeted():
        assert later <= set(memory.recent.positions[0].tolist())
    assert [memory.spans.count for memory in folds] == units
    assert all(int(memory.spans.positions.max()) < 180 for memory in folds)
    assert [row.workspace_allowance(store, row.tokens) for store in row.placement.budgeted] == room
    assert any(not torch.equal(x, y) for x, y in zip(unfolded[0], unfolded[-1]))
    caps = row.cap_bytes(180) + sum(memory.followed_nbytes for memory in row.budgeted())
    held = sum(memory.device_nbytes for memory in row.budgeted())
    whole = sum(memory.device_nbytes for memory in row.budgeted() if memory.components.whole)
    assert held - whole <= caps
    assert state.stats.excess_share > 0


def test_the_whole_memory_is_the_same_where_nothing_is_dropped(tiny, random_ids):
    """At budget 1.0 both modes are the full cache."""
    ids, more = random_ids(150, 1)[None], random_ids(50, 2)[None]
    compiled = [tiny, *(tiny.with_method("snapkv", budget=1.0, generated=mode) for mode in ("kept", "budgeted"))]
    states = [one.prefill(ids) for one in compiled]
    full, *others = (torch.stack(told(one, state, more)) for one, state in zip(compiled, states))
    for other in others:
        torch.testing.assert_close(other, full)
    assert states[1].nbytes["excess"] == 0


def test_a_plan_says_it(tiny):
    assert tiny.with_method("snapkv", budget=0.4, generated="kept").placement.plan.keeps_generated
    plan = tiny.with_method("heterocache", budget=0.9).placement.plan
    assert not plan.keeps_generated
    assert replace(plan, generated="kept").keeps_generated
