"""OmniKV: which layers filter, what a filter's attention chooses, against loops; budgets, states."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch

from semkv.errors import BudgetError, ConfigError
from semkv.ir.state_ops import EMPTY
from semkv.methods import OmniKV, find_method
from semkv.methods import omnikv as module
from semkv.runtime.step import Step
from tests.eager_steps import eagerly


def naive_highest(q, k, scale, groups):
    """Per query t of q [Hq, T, D] on k [Hkv, n, D], whose last T tokens are the queries' own: max over heads of softmax."""
    heads, new, _ = q.shape
    n, rows = k.shape[1], []
    for t in range(new):
        seen = n - new + t + 1
        best = [0.0] * n
        for head in range(heads):
            scores = [float(q[head, t].float() @ k[head // groups, j].float()) * scale for j in range(seen)]
            top = max(scores)
            total = sum(math.exp(score - top) for score in scores)
            for j, score in enumerate(scores):
                best[j] = max(best[j], math.exp(score - top) / total)
        rows.append(best)
    return torch.tensor(rows)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_a_token_scores_the_largest_weight_of_any_head(whole, strict, chunk, monkeypatch, prompt):
    """Wherever its key is; a few queries at a time or all at once."""
    monkeypatch.setattr(module, "CHUNK_SCORES", chunk)
    compiled = whole.with_method("omnikv", budget=0.8, strict=strict)
    record = compiled.prefill_record(prompt(150, 2))
    row, site = compiled.compress(record).rows[0], compiled.program.sites[1]
    folded = row.stores[1][0].spans
    assert (folded is not None and folded.count > 0) == strict
    q = record.queries[1][:, -3:]
    got = module.highest_weights(Step(torch.zeros(3).long(), 147, site, q, row.stores[1]))
    torch.testing.assert_close(got, naive_highest(q, record.keys[1], site.scale, 2), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("new", [1, 4])
def test_layers_that_follow_read_what_the_filter_looks_at(whole, new, prompt):
    """All heads the same tokens: the best that are not exact anyway, as many as fit, anew at every step."""
    compiled = eagerly(whole.with_method("omnikv", budget=0.7))
    state = compiled.prefill(prompt(240, 3))
    row, router = state.rows[0], compiled.placement.plan.at_site[1]
    chosen = []
    for seed in (4, 5):
        compiled.extend(state, prompt(new, seed))
        scores = row.passing["omnikv.1"].amax(0)
        assert scores.shape == (row.tokens,)
        held = []
        for store in (2, 3):
            (memory,) = row.stores[store]
            assert memory.components.router is router
            folded = memory.spans.positions[0].tolist()
            got = [set(positions.tolist()) - {EMPTY} for positions in memory.slots.positions]
            best = sorted(folded, key=lambda j: -float(scores[j]))[: len(got[0])]
            assert 0 < len(best) < len(folded)
            assert got == [set(best)] * 4
            held.append(got[0])
            assert memory.spans.host_tokens.length + memory.kept.length + memory.recent.length == row.tokens
        chosen.append(held[0])
    assert chosen[0] != chosen[1]


def test_filters_and_the_layers_before_them_keep_everything(whole, prompt):
    compiled = eagerly(whole.with_method("omnikv", budget=0.9, filter_layers=(1, 3)))
    state = compiled.prefill(prompt(200, 3))
    compiled.extend(state, prompt(7, 4))
    row = state.rows[0]
    assert [row.stores[layer][0].recent.length for layer in (0, 1, 3)] == [207] * 3
    assert row.stores[2][0].recent.length < 207
    assert {name for name in row.passing if name.startswith("omnikv")} == {"omnikv.1", "omnikv.3"}


def test_with_room_for_everything_it_is_full_attention(whole, prompt):
    compiled = whole.with_method("omnikv", budget=1.0)
    ids, question = prompt(300, 5), prompt(4, 6)
    state, reference = compiled.prefill(ids), whole.prefill(ids)
    assert float((compiled.extend(state, question) - whole.extend(reference, question)).abs().max()) < 2e-3
    made = [one.generate(ids, max_new_tokens=8, do_sample=False).tolist() for one in (compiled, whole)]
    assert made[0] == made[1]


KINDS = {
    "faithful": (0.7, {}),
    "two filters": (0.85, {"filter_layers": (0, 2)}),
    "strict": (0.25, {"strict": True}),
    "strict, dense layers": (0.3, {"strict": True, "filter_layers": (2,)}),
    "strict, in tokens": (100, {"strict": True}),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_budget_holds(whole, kind, grown):
    budget, options = KINDS[kind]
    state = grown(whole.with_method("omnikv", budget=budget, **options), 280, 3, 12)
    assert state.stats.moved_bytes_per_step > 0


@pytest.mark.parametrize("kind", list(KINDS))
def test_states_go_on(whole, kind, tmp_path, prompt):
    budget, options = KINDS[kind]
    compiled = whole.with_method("omnikv", budget=budget, **options)
    state = compiled.prefill(prompt(240, 240))
    compiled.extend(state, prompt(5, 3))
    state.save(tmp_path / "state")
    again, fork = compiled.load_state(tmp_path / "state"), state.fork()
    more = prompt(9, 4)
    logits = compiled.extend(state, more, all_logits=True)
    assert torch.equal(logits, compiled.extend(again, more, all_logits=True))
    assert torch.equal(logits, compiled.extend(fork, more, all_logits=True))


def test_too_small_a_budget_names_the_one_that_is_enough(whole, prompt):
    said = r"8 of 16 KV heads keep all 300 tokens, 50.0% of the KV: use a fraction of at least (0.\d+) at this length"
    with pytest.raises(BudgetError, match=said) as refused:
        whole.with_method("omnikv", budget=0.3).prefill(prompt(300, 1))
    smallest = float(re.search(said, str(refused.value))[1])
    whole.with_method("omnikv", budget=smallest).prefill(prompt(300, 1))
    with pytest.raises(BudgetError, match="keep all 300 tokens"):
        whole.with_method("omnikv", budget=smallest - 0.002).prefill(prompt(300, 1))
    with pytest.raises(BudgetError, match="budget 90 is a number of tokens"):
        whole.with_method("omnikv", budget=90).prefill(prompt(300, 1))
    with pytest.raises(BudgetError, match="'omnikv' needs at least 40"):
        whole.with_method("omnikv", budget=0.05, strict=True).prefill(prompt(300, 1))


def layers_of(count: int, treated=lambda index: True) -> SimpleNamespace:
    sites = [SimpleNamespace(index=i, treatment="method" if treated(i) else "window") for i in range(count)]
    return SimpleNamespace(stores=sites)


def profile_with(scores: list[list[float]]) -> SimpleNamespace:
    return SimpleNamespace(info=SimpleNamespace(retrieval_heads=SimpleNamespace(semantic=scores)))


def test_one_layer_in_ten_filters_the_one_that_retrieves_best(whole):
    assert OmniKV().filters(layers_of(32), None) == (2, 12, 22)
    assert OmniKV(layers_per_filter=16).filters(layers_of(32), None) == (2, 17)
    scores = [[0.0, 0.1]] * 32
    for layer in (0, 9, 13, 31):  # the first is among those that never filter
        scores[layer] = [0.9, 0.0]
    assert OmniKV().filters(layers_of(32), profile_with(scores)) == (9, 13, 31)
    assert OmniKV().filters(layers_of(36, lambda index: index % 6 == 5), None) == (11,)
    assert [OmniKV().filters(layers_of(count), None) for count in (1, 2, 4)] == [(0,), (0,), (1,)]
    assert OmniKV().filters(layers_of(2, lambda index: False), None) == (0,)
    compiled = whole.with_method("omnikv", budget=0.7)
    assert compiled.method.filters(compiled.program, compiled.profile) == (1,)


def test_filters_of_ones_own_choice_are_layers_of_the_model(whole):
    assert find_method("omnikv", {"filter_layers": [0, 2]}).filters(layers_of(4), None) == (0, 2)
    with pytest.raises(ConfigError, match="has 7; expected some of this model's layers 0, 1, 2, 3"):
        whole.with_method("omnikv", budget=0.7, filter_layers=(1, 7))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"filter_layers": (2, 1)}, r"'filter_layers' .* is \(2, 1\); expected numbers of layers in ascending order"),
        ({"filter_layers": "2,8"}, "'filter_layers' .* is '2,8'; expected numbers of layers"),
        ({"layers_per_filter": 0}, "option 'layers_per_filter' .* is 0; expected at least 1"),
        ({"bits": 3}, "option 'bits' .* is 3; expected 4, 8 or 16"),
    ],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        find_method("omnikv", options)
