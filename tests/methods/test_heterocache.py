"""HeteroCache: budgets by stability, drift and updates, what satellites hold, against loops; states, records."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from dataclasses import replace

import pytest
import torch

from semkv import bundled
from semkv.config import CompileConfig
from semkv.errors import BudgetError, ConfigError
from semkv.ir.site import AttentionSite
from semkv.ir.state_ops import EMPTY
from semkv.methods import HeteroCache, find_method
from semkv.methods.pivots import PivotRouter, turns
from semkv.profiles.schema.allocation import head_budgets
from semkv.runtime.step import Step
from tests.conftest import quick_ones

SITE = AttentionSite(index=3, name="layer", store=3, q_heads=4, kv_heads=2, key_dim=8, value_dim=8, scale=0.4)
CLUSTERS = {"tau_similar": 0.05}
"""A threshold at which heads of the bundled model form clusters."""


def test_compressed_heads_divide_what_whole_heads_leave(whole, prompt):
    """Eq. 7-8: inversely to stability, over all layers."""
    compiled = whole.with_method("heterocache", budget=0.7, **CLUSTERS)
    row = compiled.prefill(prompt(300, 1)).rows[0]
    roles, _ = compiled.method.taxonomy(compiled.profile)
    stability = compiled.profile.info.head_taxonomy.stability
    stores = compiled.program.stores
    stable = {
        (site.store, place): stability[number][head]
        for number, site in enumerate(stores)
        for place, head in enumerate(site.head_order or range(4))
        if roles[number][head] in ("anchor", "satellite")
    }
    assert set(row.part_shares) == set(stable)
    assert sum(row.part_shares.values()) == pytest.approx(1)
    full_heads = 16 - len(stable)
    sizes = head_budgets(list(stable.values()), full_heads, 0.7, 300)
    for place, size in zip(stable, sizes):
        assert row.part_shares[place] * sum(sizes) == pytest.approx(size, rel=0.12, abs=2)
    even = whole.with_method("heterocache", budget=0.7, uniform=True, **CLUSTERS).prefill(prompt(300, 1)).rows[0]
    assert list(even.part_shares.values()) == pytest.approx([1 / len(stable)] * len(stable), rel=1e-3)


def test_no_head_gets_more_than_all_tokens(whole, prompt):
    row = whole.with_method("heterocache", budget=0.9, **CLUSTERS).prefill(prompt(200, 1)).rows[0]
    for (store, first), memory in (
        (key, memory) for key in row.part_shares for memory in row.stores[key[0]] if memory.site.first_head == key[1]
    ):
        cap = row._part_cap(
            memory.site, next(p for p in row.placement.parts(row.placement.stores[store]) if p.first == first), 200
        )
        assert cap <= (200 + 18) * (128 * 2 + 4)


class Given(PivotRouter):
    """A router whose pivot attends as it is told: what its queries hold is what they give the tokens."""

    def weights(self, step, own, q, tokens):
        return q[0, :, :tokens]


@pytest.mark.parametrize("cuts", [(1,) * 17, (3, 5, 9), (17,)])
@pytest.mark.parametrize("tau", [0.5, 0.9])
def test_drift_updates_as_the_algorithm_says(cuts, tau):
    """Alg. 1, lines 24 to 44, for two satellites whose own rankings differ."""
    generator = torch.Generator().manual_seed(5)
    n, base_length, every = 40, 6, 5
    rows = torch.rand(17, n + 17, generator=generator)
    rows[4:] = rows[4:] * 0.2 + rows[9].clone()  # attention that settles after a while
    own = [torch.randperm(n, generator=generator).int() for _ in range(2)]
    router = Given({(3, 0): 1, (3, 2): 1}, every, tau, 5, True, ((SITE, 1),))
    base = set(rows[0, :n].argsort(descending=True)[:base_length].tolist())
    orders, expected, buffered, updates = [one.tolist() for one in own], [], [], 0
    for t in range(17):
        expected.append([*orders])
        ranked = sorted(range(n + t + 1), key=lambda j: -float(rows[t, j]))
        buffered.append(ranked)
        if len(buffered) == every:
            if statistics.median(len(set(one[:base_length]) & base) / base_length for one in buffered) < tau:
                orders, base, updates = [ranked, ranked], set(ranked[:base_length]), updates + 1
            buffered = []
    notes = {
        "satellite.order.3.0": own[0],
        "satellite.order.3.2": own[1],
        "pivot.base.3.1": rows[0, :n].argsort(descending=True)[:base_length].int(),
        "pivot.queries.3.1": torch.zeros(2, 0, n + 17),
        "pivot.checks.3.1": torch.zeros(2).long(),
    }
    site = replace(SITE, q_heads=8, kv_heads=4)
    q, got, at = rows.expand(8, -1, -1), [], 0
    for cut in cuts:
        step = Step(torch.zeros(cut).long(), n + at, site, q[:, at : at + cut], notes=notes)
        before = [router.orders(step, head)[0] for head in (0, 2)]
        router.stored(step)
        made = [router.orders(step, head) for head in (0, 2)]
        assert all(first is one[0] for first, one in zip(before, made)), "known before the turn"
        got += [[one.tolist() for one in pair] for pair in zip(*made)]
        at += cut
    assert got == expected
    assert notes["pivot.checks.3.1"].tolist() == [3, updates]
    assert set(notes["pivot.base.3.1"].tolist()) == base
    assert 0 < updates < 3 or tau > 0.5
    assert notes["pivot.queries.3.1"].shape[1] == 17 % every


def test_what_follows_on_a_ranking_takes_turns_with_it():
    order = torch.tensor([3, 7, 0, 5, 1, 6, 2, 4], dtype=torch.int32)  # 6 and 7 are among its last two tokens
    assert turns(order.long(), 11, 2).argsort()[:9].tolist() == [10, 3, 9, 0, 8, 5, 7, 1, 6]
    assert turns(order.long(), 8, 0)[:8].argsort().tolist() == order.tolist()
    assert turns(order.long(), 7, 2)[:7].argsort().tolist() == [6, 3, 0, 5, 1, 2, 4]


def naive_weights(q, k, scale, pool):
    """Mean over the group's softmax of one query on k [n, D], then the mean of `pool` neighbours, zeros beyond the ends."""
    n, mean = len(k), [0.0] * len(k)
    for head in q:
        scores = [float(head.float() @ key.float()) * scale for key in k]
        total = sum(math.exp(score) for score in scores)
        mean = [have + math.exp(score) / total / len(q) for have, score in zip(mean, scores)]
    half = pool // 2
    return [sum(mean[max(0, j - half) : min(n, j + half + 1)]) / pool for j in range(n)]


@pytest.mark.parametrize("strict", [False, True])
def test_a_pivot_is_asked_for_all_of_its_tokens(whole, strict, prompt):
    """Wherever they are; the prompt's last query makes the baseline, of L_base tokens (Eq. 7)."""
    compiled = whole.with_method("heterocache", budget=0.7, strict=strict, **CLUSTERS)
    record = compiled.prefill_record(prompt(150, 2))
    row = compiled.compress(record).rows[0]
    site = compiled.program.sites[1]
    router = next(m.components.router for m in row.stores[1] if isinstance(m.components.router, PivotRouter))
    pivot = router.pivots[1, next(head for store, head in router.pivots if store == 1)]
    heads = slice(pivot * site.group_size, (pivot + 1) * site.group_size)
    expected = naive_weights(record.queries[1][heads, -1], record.keys[1][pivot], site.scale, 5)
    step = Step(torch.zeros(1).long(), 149, site, record.queries[1][:, -1:], row.stores[1])
    got = router.weights(step, site.part(pivot, pivot + 1, 1.0), record.queries[1][heads, -1:], 150)[0]
    torch.testing.assert_close(got, torch.tensor(expected), rtol=0.1 if strict else 1e-3, atol=1e-3 if strict else 1e-6)
    full = 0 if strict else sum(role in ("pivot", "volatile") for one in compiled.program.stores for role in one.roles)
    base = set(row.notes[f"pivot.base.1.{pivot}"].tolist())
    assert len(base) == int((0.7 * 16 - full) * 150 / (16 - full))
    assert base == set(sorted(range(150), key=lambda j: -expected[j])[: len(base)])


def on_device(memory) -> set[int]:
    """Positions of what one satellite holds in its slots."""
    return {at for at in memory.slots.positions[0].tolist() if at != EMPTY}


@pytest.mark.parametrize("tau", [0.7, 1e-6])
def test_satellites_hold_what_the_algorithm_says(whole, tau, prompt, monkeypatch):
    """Alg. 1 in loops beside the model: each satellite starts with its own best tokens (line 17), takes its pivot's at an update, and
    what is generated takes turns with them; with a trigger that never fires, for longer than the window is."""
    n, steps, every, recent = 150, 60, 4, 32
    compiled = whole.with_method("heterocache", budget=0.6, every=every, tau_drift=tau, **CLUSTERS)
    record = compiled.prefill_record(prompt(n, 3))
    state = compiled.compress(record)
    row, asked = state.rows[0], {}
    plain = PivotRouter.stored
    monkeypatch.setattr(
        PivotRouter, "stored", lambda self, step: asked.update({step.site.index: step.q.clone()}) or plain(self, step)
    )
    (router,) = {m.components.router for m in row.budgeted() if isinstance(m.components.router, PivotRouter)}

    def weights(site, head, q, keys):
        return naive_weights(q[head * site.group_size : (head + 1) * site.group_size, -1], keys, site.scale, 5)

    def best(values):
        return sorted(range(len(values)), key=lambda j: -values[j])

    sites = {site.store: site for site in compiled.program.sites}
    full = sum(role in ("pivot", "volatile") for site in sites.values() for role in site.roles)
    base_length = int((0.6 * 16 - full) * n / (16 - full))
    first = {
        place: best(weights(sites[place[0]], place[1], record.queries[place[0]], record.keys[place[0]][place[1]]))
        for place in [*router.pivots, *{(store, pivot) for (store, _), pivot in router.pivots.items()}]
    }
    orders = {place: first[place] for place in router.pivots}
    bases = {(store, pivot): set(first[store, pivot][:base_length]) for (store, _), pivot in router.pivots.items()}
    buffered, updates, apart = {place: [] for place in bases}, 0, 0
    for t, token in enumerate(prompt(steps, 4)[0]):
        compiled.extend(state, token[None, None])
        for (store, head), pivot in router.pivots.items():
            (memory,) = (one for one in row.stores[store] if one.site.first_head == head)
            newest, order = len(orders[store, head]) - recent, orders[store, head]
            older = [j for j in order if j < newest]
            folded, held = set(memory.spans.positions[0].tolist()), on_device(memory)
            later = list(range(max(folded), newest - 1, -1))
            mixed = [j for pair in itertools.zip_longest(later, older) for j in pair if j is not None]
            assert held == set([j for j in mixed if j in folded][: len(held)])
            assert 8 < len(held) < len(folded)
            assert memory.spans.host_tokens.length + memory.kept.length + memory.recent.length == n + t + 1
            apart += len(held ^ set([j for j in first[store, pivot] if j in folded][: len(held)]))
            if tau < 0.1 and t == steps - 1:
                there = held | set(memory.recent.positions[0].tolist())
                assert set(range(n + t + 1 - len(there) // 2 + 4, n + t + 1)) <= there, "what is recent stays"
        for store, pivot in bases:
            (memory,) = (one for one in row.stores[store] if 0 <= pivot - one.site.first_head < one.site.kv_heads)
            keys = memory.recent.k[pivot - memory.site.first_head, : memory.recent.length]
            buffered[store, pivot].append(weights(sites[store], pivot, asked[store], keys))
            if len(buffered[store, pivot]) == every:
                tops = [set(best(one)[:base_length]) for one in buffered[store, pivot]]
                if statistics.median(len(top & bases[store, pivot]) / base_length for top in tops) < tau:
                    updates, bases[store, pivot] = updates + 1, tops[-1]
                    ranking = best(buffered[store, pivot][-1])
                    orders |= {
                        place: ranking for place, own in router.pivots.items() if (place[0], own) == (store, pivot)
                    }
                buffered[store, pivot] = []
    checks = [row.notes[name].tolist() for name in row.notes if "checks" in name]
    assert [sum(one) for one in zip(*checks)] == [len(bases) * steps // every, updates]
    assert (0 < updates < len(bases) * steps // every) == (tau > 0.1)
    assert apart > 0, "rankings of satellites and pivots are told apart"


def test_a_step_without_a_look_does_not_rank(whole, prompt, monkeypatch):
    """Queries are looked at every W steps, also where some tokens run at once."""
    compiled = whole.with_method("heterocache", budget=0.33, every=6, tau_drift=0.6, **CLUSTERS)
    state = compiled.prefill(prompt(600, 3))
    looked, plain = [], PivotRouter.weights
    monkeypatch.setattr(PivotRouter, "weights", lambda self, *given: looked.append(at) or plain(self, *given))
    for at, ids in enumerate(prompt(48, 4).split([1] * 31 + [5] + [1] * 12, 1)):
        compiled.extend(state, ids)
        if at == 20:
            state = state.fork()
    assert set(looked) == {5, 11, 17, 23, 29, 31, 37, 43}


def test_a_drift_threshold_follows_the_stability_threshold(whole):
    """Sec. 5.1: tau_drift is tau_stable, the one that roles are made with, unless it is given."""

    def drift(**options):
        plan = whole.with_method("heterocache", budget=0.9, **options).placement.plan
        return plan.after_prompt.tau_drift

    profile = whole.profile.info.head_taxonomy.tau_stable
    assert drift(tau_similar=0.05) == profile
    assert drift(tau_similar=0.05, tau_stable=0.3) == 0.3 != profile
    assert drift(tau_similar=0.05, tau_stable=0.3, tau_drift=0.6) == 0.6


def test_what_stays_is_not_moved_again(whole, prompt):
    compiled = whole.with_method("heterocache", budget=0.6, retrieval=False, recent=64, **CLUSTERS)
    state = compiled.prefill(prompt(260, 3))
    compiled.extend(state, prompt(1, 4))
    moved = state.rows[0].traffic.moved_bytes
    compiled.extend(state, prompt(1, 5))
    assert state.rows[0].traffic.moved_bytes - moved < 0.05 * moved


def test_the_drift_check_runs_once_a_step_and_site(whole, prompt):
    """Where tokens come alone and where several come at once."""
    config = CompileConfig(floor=0, kv_dtype="float16")
    compiled = whole.with_method(
        "heterocache", budget=0.6, config=config, recent=16, every=2, tau_drift=0.99, **CLUSTERS
    )
    state = compiled.prefill(prompt(260, 3))
    for ids in prompt(24, 4).split([1] * 8 + [5] + [1] * 11, 1):
        compiled.extend(state, ids)
    checks = {name: at.tolist() for name, at in state.rows[0].notes.items() if "checks" in name}
    assert checks
    assert all(done == 24 // 2 for done, _ in checks.values())
    assert any(updates > 2 for _, updates in checks.values())


KINDS = {
    "faithful": (0.7, CLUSTERS),
    "uniform": (0.7, {"uniform": True, **CLUSTERS}),
    "static": (0.7, {"retrieval": False, **CLUSTERS}),
    "anchors": (0.8, {"tau_stable": 0.1, "tau_similar": 0.4}),
    "strict": (0.5, {"strict": True, **CLUSTERS}),
    "strict, in tokens": (100, {"strict": True}),
    "recoverable": (0.8, {"tau_stable": 0.1, "tau_similar": 0.4, "recoverable": True}),
}


@pytest.mark.parametrize("kind", quick_ones(KINDS, ("faithful", "anchors", "strict, in tokens", "recoverable")))
def test_the_budget_holds(whole, kind, grown):
    budget, options = KINDS[kind]
    grown(whole.with_method("heterocache", budget=budget, **options), 280, 4, 11)


def test_anchors_keep_their_choice_and_recoverable_keeps_the_rest(whole, prompt):
    """The paper's anchors drop what they do not keep; `recoverable` folds all of it, and unfolds some in each step."""
    options = {"uniform": True, "tau_stable": 0.001, "tau_similar": 1.0}
    compiled = whole.with_method("heterocache", budget=0.4, **options)
    assert {role for site in compiled.program.stores for role in site.roles} == {"anchor"}
    dropping = compiled.prefill(prompt(300, 1))
    assert all(memory.spans is None for memory in dropping.rows[0].budgeted())
    assert dropping.nbytes["host"] == 0

    compiled = whole.with_method("heterocache", budget=0.4, recoverable=True, **options)
    state = compiled.prefill(prompt(300, 1))
    memories = list(state.rows[0].budgeted())
    chosen = [memory.kept.positions[0].tolist() for memory in memories]
    compiled.extend(state, prompt(40, 2))
    for memory, kept in zip(memories, chosen):
        assert len(kept) >= 16
        assert memory.kept.positions[0].tolist() == kept  # a static choice
        _, folded = memory.spans.waiting_places()
        assert sorted([*kept, *memory.recent.positions[0].tolist(), *folded.tolist()]) == list(range(340))
        assert memory.slots.filled > 0


@pytest.mark.parametrize("kind", quick_ones(KINDS, ("static", "strict", "recoverable")))
def test_states_go_on(whole, kind, tmp_path, prompt):
    budget, options = KINDS[kind]
    compiled = whole.with_method("heterocache", budget=budget, every=2, tau_drift=0.9, **options)
    state = compiled.prefill(prompt(240, 240))
    compiled.extend(state, prompt(5, 3))
    state.save(tmp_path / "state")
    again, fork = compiled.load_state(tmp_path / "state"), state.fork()
    more = prompt(9, 4)
    logits = compiled.extend(state, more, all_logits=True)
    assert torch.equal(logits, compiled.extend(again, more, all_logits=True))
    assert torch.equal(logits, compiled.extend(fork, more, all_logits=True))


def test_a_record_of_another_program_has_its_heads_put_in_order(whole, prompt):
    compiled = whole.with_method("heterocache", budget=0.97)
    assert any(site.head_order for site in compiled.program.stores)
    ids, more = prompt(150, 6), prompt(4, 7)
    foreign, own = whole.prefill_record(ids), compiled.prefill_record(ids)
    assert foreign.head_orders != own.head_orders
    one, other = compiled.compress(foreign), compiled.compress(own)
    got, expected = compiled.extend(one, more), compiled.extend(other, more)
    assert float((got.softmax(-1) - expected.softmax(-1)).abs().max()) < 1e-3
    back = own.ordered_for(whole.program)
    assert back.head_orders == {}
    torch.testing.assert_close(back.keys[0], foreign.keys[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(back.queries[0], foreign.queries[0], rtol=1e-3, atol=1e-3)


def test_roles_stand_side_by_side(whole):
    compiled = whole.with_method("heterocache", budget=0.95)
    for site, roles in zip(compiled.program.stores, compiled.profile.info.head_taxonomy.roles):
        assert tuple(roles[head] for head in site.head_order or range(4)) == site.roles
        assert len([1 for left, right in zip(site.roles, site.roles[1:]) if left != right]) == len(set(site.roles)) - 1


def test_too_small_a_budget_names_the_one_that_is_enough(whole, prompt):
    compiled = whole.with_method("heterocache", budget=0.5)
    said = r"14 of 16 KV heads keep all 300 tokens, 87.5% of the KV: use a fraction of at least (0.\d+) at this length"
    with pytest.raises(BudgetError, match=said) as refused:
        compiled.prefill(prompt(300, 1))
    smallest = float(re.search(said, str(refused.value))[1])
    whole.with_method("heterocache", budget=smallest).prefill(prompt(300, 1))
    with pytest.raises(BudgetError, match="keep all 300 tokens"):
        whole.with_method("heterocache", budget=smallest - 0.002).prefill(prompt(300, 1))
    with pytest.raises(
        BudgetError, match="budget 90 is a number of tokens, but 'heterocache' keeps every token of some heads"
    ):
        whole.with_method("heterocache", budget=90).prefill(prompt(300, 1))


def test_a_profile_without_roles_is_refused():
    bare = bundled.profile()
    info = bare.info.model_copy(update={"head_taxonomy": None})
    tensors = {name: x for name, x in bare.tensors.items() if not name.startswith("taxonomy.")}
    for profile in (None, replace(bare, info=info, tensors=tensors)):
        with pytest.raises(
            ConfigError, match="needs a profile with head roles: measure them with `semkv-profile MODEL --steps tax"
        ):
            HeteroCache().check(profile)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tau_drift": 1.5}, r"option 'tau_drift' .* is 1.5; expected an overlap in \(0, 1\]"),
        ({"pool": 4}, "option 'pool' .* is 4; expected an odd width"),
        ({"every": 0}, "option 'every' .* is 0; expected at least 1"),
        ({"bits": 3}, "option 'bits' .* is 3; expected 4, 8 or 16"),
    ],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        find_method("heterocache", options)
