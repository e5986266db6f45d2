"""CompressKV: which heads choose, how layers share, what recoverable keeps; against loops."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from semkv import bundled
from semkv.api import compile as compile_model
from semkv.config import CompileConfig
from semkv.errors import ConfigError
from semkv.ir.site import AttentionSite
from semkv.methods import CompressKV, find_method
from semkv.methods.compresskv import ErrorAllocation, HeadVotes
from semkv.methods.kept_and_runs import KeptAndRuns
from semkv.profiles.bundled.tasks import make_text
from semkv.profiles.schema import Profile
from semkv.profiles.schema.allocation import layer_budgets
from semkv.runtime.prompt.record import RowRecord

SITE = AttentionSite(index=0, name="layer", store=0, q_heads=6, kv_heads=3, key_dim=7, value_dim=5, scale=0.4)
NEXT = replace(SITE, index=1, store=1, name="next", budget_share=0.25)
SCORES = ((0.1, 0.9, 0.3, 0.0, 0.2, 0.8), (0.5, 0.1, 0.1, 0.7, 0.6, 0.0))


def profile(**sections):
    heads = SimpleNamespace(semantic=SCORES, classic=SCORES[::-1], classic_top_k=SCORES)
    known = {"retrieval_heads": heads, "layer_errors": SimpleNamespace(errors=(0.75, 0.25))}
    return SimpleNamespace(info=SimpleNamespace(**(known | sections)))


PROGRAM = SimpleNamespace(stores=(SITE, NEXT), sites=(SITE, NEXT))


def record(n: int) -> RowRecord:
    generator = torch.Generator().manual_seed(n)
    out = RowRecord(ids=torch.zeros(n, dtype=torch.int64))
    for site in (SITE, NEXT):
        out.keys[site.store] = torch.randn(3, n, 7, generator=generator)
        out.queries[site.index] = torch.randn(6, min(n, 64), 7, generator=generator)
    return out


def votes(of: RowRecord, heads: list[int], window: int, kernel: int, tail: int) -> list[float]:
    """Sum over the window, average-pool, mean over the chosen heads."""
    q, k, n = of.queries[0], of.keys[0], of.tokens
    out = [0.0] * (n - tail)
    for head in heads:
        mass = [0.0] * (n - tail)
        for at in range(n - window, n):
            scores = [float(q[head, at - n] @ k[head // 2, j]) * SITE.scale for j in range(at + 1)]
            total = sum(math.exp(score) for score in scores)
            for j in range(n - tail):
                mass[j] += math.exp(scores[j]) / total
        half = kernel // 2
        for j in range(n - tail):
            out[j] += sum(mass[max(0, j - half) : j + half + 1]) / kernel / len(heads)
    return out


@pytest.mark.parametrize(("heads", "tail"), [([1, 5], 8), ([0, 1, 2, 5], 13), (None, 8)])
def test_the_chosen_heads_vote_for_all(heads, tail):
    of = record(47)
    keeper = HeadVotes(8, 5, "mean", 0, {} if heads is None else {0: tuple(heads)})
    expected = votes(of, heads or list(range(6)), 8, 5, tail)
    torch.testing.assert_close(keeper.scores(SITE, of, tail), torch.tensor([expected]), rtol=1e-4, atol=1e-6)
    kept, recent = keeper.keep(SITE, of, 32, 8)
    assert (kept.shape, recent) == ((1, 24), 39)
    best = sorted(sorted(range(39), key=lambda j: -votes(of, heads or list(range(6)), 8, 5, 8)[j])[:24])
    assert kept[0].tolist() == best


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"heads": 2}, {0: (1, 5), 1: (3, 4)}),
        ({"heads": 2, "selection": "classic"}, {0: (3, 4), 1: (1, 5)}),
        ({"heads": 99}, {0: (0, 1, 2, 3, 4, 5), 1: (0, 1, 2, 3, 4, 5)}),
        ({"selection": "all"}, {}),
    ],
)
def test_the_best_heads_choose(options, expected):
    keeper = find_method("compresskv", options).components(PROGRAM, profile()).keeper
    assert keeper.heads == expected


def test_heads_follow_their_kv_heads():
    """KV head 2 of the model stands first: its query heads 4 and 5 are 0 and 1 of the program."""
    moved = replace(SITE, head_order=(2, 0, 1))
    program = SimpleNamespace(stores=(moved,), sites=(moved,))
    assert CompressKV(heads=2).components(program, profile()).keeper.heads == {0: (1, 3)}


@pytest.mark.parametrize("budget", [20.0, 50.0, 300.0])
def test_layers_share_by_error(budget):
    stores = (replace(SITE, budget_share=0.9), replace(NEXT, budget_share=0.1))
    shares = ErrorAllocation(32).shares(stores, record(10), budget)
    total = int(2 * budget)
    expected = layer_budgets([0.9, 0.1], total, minimum=32, scale_minimum=True)
    assert [round(share * total) for share in shares] == expected
    assert sum(shares) == pytest.approx(1)
    if budget == 300:
        assert expected == [round(32 + 0.9 * 536), round(32 + 0.1 * 536)]


@pytest.mark.parametrize(
    ("minimum", "recoverable", "least"),
    [
        (8, False, 24),
        pytest.param(16, False, 24, marks=pytest.mark.slow),
        pytest.param(24, False, 24, marks=pytest.mark.slow),
        pytest.param(32, False, 32, marks=pytest.mark.slow),
        (64, False, 64),
        (32, True, 40),
        (64, True, 64),
    ],
)
def test_a_layer_without_errors_gets_the_minimum(minimum, recoverable, least):
    """m as Alg. 1 has it, or the smallest budget, which the others then give up in proportion; no token is lost."""
    model, tokenizer = bundled.load()
    known = bundled.profile()
    errors = known.info.layer_errors.model_copy(update={"errors": (0.0, 0.3, 0.3, 0.4)})
    known = Profile(known.info.model_copy(update={"layer_errors": errors}), known.tensors)
    options = {"minimum": minimum, "recoverable": recoverable}
    config = CompileConfig(floor=0, kv_dtype="float16", page_size=8, method_options=options, cache=True)
    compiled = compile_model(model, known, method="compresskv", budget=100, config=config)
    ids = tokenizer(make_text(700, 0), return_tensors="pt")["input_ids"][:, :600]
    state = compiled.prefill(ids)
    row = state.rows[0]
    total = 100 * len(row.shares)
    first, *others = layer_budgets([1e-6, 0.3, 0.3, 0.4], total, minimum=minimum)
    assert first == minimum
    wanted = [least, *(size * (total - least) / sum(others) for size in others)]
    assert sum(row.shares.values()) == pytest.approx(1, abs=1e-9)
    held = [sum(memory.kept.length + memory.recent.length for memory in store) for store in row.stores.values()]
    if recoverable:
        assert list(row.shares.values()) == pytest.approx([size / total for size in wanted], rel=2e-3)
        assert held[0] <= least
    else:  # whole pages beside their positions, as many as with even shares
        even = 100 * 128 // 132 // 8 * 8
        assert sum(held) == len(held) * even
        assert all(abs(own - size * even / 100) < 8 for own, size in zip(held, wanted))
    for _ in range(3):
        compiled.extend(state, ids[:, :20])
    assert row.traffic.peak_share <= 1


def test_the_smallest_budget_is_that_of_the_mode():
    assert (CompressKV.minimum_tokens, CompressKV().minimum_tokens) == (24, 24)
    assert find_method("compresskv", {"recoverable": True}).minimum_tokens == 40
    assert find_method("compresskv", {"minimum": 64}).minimum_tokens == 24


def test_errors_are_in_the_annotated_graph(decoder_program):
    errors = SimpleNamespace(errors=(0.6, 0.0, 0.4))
    assert CompressKV().layer_shares(decoder_program, profile(layer_errors=errors)) == (0.6, 1e-6, 0.4)
    assert CompressKV(allocation="uniform").layer_shares(decoder_program, None) is None


@pytest.mark.parametrize(
    ("sections", "options", "said"),
    [
        (
            {"retrieval_heads": None},
            {},
            "a profile with retrieval heads: .*--steps retrieval-heads -o OUT.*'selection': 'all'",
        ),
        (
            {"layer_errors": None},
            {},
            "a profile with layer errors: .*--steps layer-errors -o OUT.*'allocation': 'uniform'",
        ),
    ],
)
def test_a_profile_without_the_sections_is_refused(sections, options, said):
    with pytest.raises(ConfigError, match=said):
        CompressKV(**options).check(profile(**sections))
    with pytest.raises(ConfigError, match="needs a profile with retrieval heads"):
        CompressKV().check(None)
    CompressKV(selection="all", allocation="uniform").check(None)


@pytest.mark.parametrize("room", [40.0, 90.0])
def test_recoverable_folds_what_is_not_kept(room):
    of, cost = record(181), 0.3
    parts = KeptAndRuns(HeadVotes(8, 5, "mean"), 16).segment(of, SITE, room, cost, 8)
    tokens = sorted([*parts.kept.tolist(), *parts.folded.tolist(), *range(parts.recent, 181)])
    assert tokens == list(range(181))
    assert len(parts.kept) > 0
    assert int(parts.lengths.max()) <= (16 if room == 90 else 64)
    window = 181 - parts.recent
    assert len(parts.starts) * cost + -(-len(parts.kept) // 8) * 8 + window + 8 <= room


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"heads": 0}, "option 'heads' of method 'compresskv' is 0; expected at least 1"),
        (
            {"selection": "best"},
            "option 'selection' of method 'compresskv' is 'best'; expected one of 'semantic', 'classic'",
        ),
        ({"window": 70}, "option 'window' of method 'compresskv' is 70; expected 1 to 64 queries"),
    ],
)
def test_options_are_checked(options, said):
    with pytest.raises(ConfigError, match=said):
        find_method("compresskv", options)
