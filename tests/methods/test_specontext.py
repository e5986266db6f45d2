"""SpeContext: the selection against loops, keys of the head over steps, the budget with the head's keys in it, artifacts."""

from __future__ import annotations

import math

import pytest
import torch

import semkv
from semkv import bundled
from semkv.api import compile as compile_model
from semkv.config import CompileConfig
from semkv.errors import BudgetError, ConfigError
from semkv.ir.site import AttentionSite
from semkv.methods import SpeContext, find_method
from semkv.methods.speculation import KEYS, NEWEST, RANKING, SCALE, UNREAD, Ranking, Speculation, SpeculativeRouter
from semkv.passes.retrieval_graph import head_graph
from semkv.profiles.calibration.steps import with_section
from semkv.profiles.schema.retrieval_head import PREFIX, RetrievalHead, RetrievalHeadSection, Yarn
from semkv.runtime.components import Components
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.store.segments import Cut, Folding
from semkv.runtime.store.spans import FoldedSpans

SIZES = {
    "hidden": 192,
    "q_heads": 8,
    "kv_heads": 4,
    "head_dim": 16,
    "theta": 1e5,
    "yarn": Yarn(factor=4, positions=512),
    "parameters": 70_000,
    "whole": 700_000,
}
FEATURES = {"feature_sites": (1,), "features": 192}
UNCAPPED = float("inf")


def keys_of(notes) -> torch.Tensor:
    return torch.cat([notes[KEYS], notes[f"{KEYS}{NEWEST}"]], 1)


def make_head(seed=0, **changes) -> RetrievalHead:
    section = RetrievalHeadSection(**(SIZES | FEATURES | changes))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name.removeprefix(PREFIX): torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 0.2
        for name, shape in section.tensor_shapes().items()
    }
    return RetrievalHead(section, tensors)


def with_head(head: RetrievalHead):
    named = {f"{PREFIX}{name}": x for name, x in head.tensors.items()}
    return with_section(bundled.profile(), "retrieval_head", head.section, PREFIX, named)


@pytest.fixture(scope="module")
def whole():
    model, _ = bundled.load()
    return compile_model(
        model, with_head(make_head()), method="full", config=CompileConfig(floor=0, kv_dtype="float16", cache=True)
    )


def prompt(tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 600, (1, tokens), generator=torch.Generator().manual_seed(seed))


# -- the selection -------------------------------------------------------------------------------------------------------


def small(strict=False, batch=False, **changes) -> Speculation:
    head = make_head(hidden=12, head_dim=6, **({"features": 12, "feature_sites": (1,)} | changes))
    table = torch.randn(50, 12, generator=torch.Generator().manual_seed(9))
    return Speculation(head_graph(head, table, "table"), head.section, strict, batch=batch)


def record(ids, features) -> RowRecord:
    return RowRecord(ids=ids, features={1: features} if features is not None else {})


def ranking(speculation, ids, before) -> torch.Tensor:
    """Weights [Hkv, m] of the last token, in loops: softmax per query head over all tokens, the largest of the group."""
    section = speculation.section
    given = [] if before is None else [before[None]]
    q, k = speculation.selector(ids[None], torch.arange(len(ids))[None], *given)
    out = torch.zeros(section.kv_heads, len(ids))
    for head in range(section.q_heads):
        group = head // (section.q_heads // section.kv_heads)
        scores = [float(q[0, head, -1] @ k[0, group, place]) for place in range(len(ids))]
        total = sum(math.exp(score) for score in scores)
        for place, score in enumerate(scores):
            out[group, place] = max(float(out[group, place]), math.exp(score) / total)
    return out


@pytest.mark.parametrize("features", [True, False])
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.slow
def test_the_ranking_is_the_largest_weight_of_each_group(features, batch):
    speculation = small(batch=batch) if features else small(batch=batch, feature_sites=(), features=0)
    ids, hidden = prompt(21, 1)[0] % 50, torch.randn(21, 12)
    notes, passing = {}, {}
    speculation.read(record(ids[:20], hidden[:20] if features else None), notes, lambda n: UNCAPPED)
    speculation.begin(ids[20:], 20, notes, passing, lambda n: UNCAPPED)
    before = torch.cat([torch.zeros(1, 12), hidden[:-1]]) if features else None
    wanted = ranking(speculation, ids, before)
    made = passing[RANKING]
    assert made.first == 0
    torch.testing.assert_close(
        made.logs[:, 0].exp(), wanted.mean(0, keepdim=True) if batch else wanted, rtol=0.02, atol=1e-4
    )


def test_keys_do_not_depend_on_how_tokens_were_divided_into_steps():
    """Features of a token are known only after its step: keys of the others in a chunk follow in the next one."""
    speculation = small()
    ids, hidden = prompt(40, 2)[0] % 50, torch.randn(40, 12)
    kept = {}
    for name, steps in (("one", [1] * 10), ("chunks", [3, 1, 5, 1]), ("all", [9, 1])):
        notes, passing, at = {}, {}, 30
        speculation.read(record(ids[:30], hidden[:30]), notes, lambda n: UNCAPPED)
        for count in steps:
            speculation.begin(ids[at : at + count], at, notes, passing, lambda n: UNCAPPED)
            assert passing[RANKING].logs.shape[1] == count
            assert keys_of(notes).shape[1] == at + 1
            notes["features.1"] = hidden[at : at + count]
            at += count
        kept[name] = keys_of(notes)
        assert not len(notes[UNREAD])
    torch.testing.assert_close(kept["chunks"], kept["one"])
    torch.testing.assert_close(kept["all"], kept["one"])
    assert not torch.equal(kept["one"][:, 30], kept["one"][:, 31])


def test_tokens_of_a_chunk_do_not_see_later_ones():
    speculation = small(feature_sites=(), features=0)
    ids = prompt(12, 3)[0] % 50
    notes, passing = {}, {}
    speculation.read(record(ids[:8], None), notes, lambda n: UNCAPPED)
    speculation.begin(ids[8:], 8, notes, passing, lambda n: UNCAPPED)
    weights = passing[RANKING].logs.exp()
    assert weights.shape == (4, 4, 12)
    for place in range(4):
        assert not weights[:, place, 9 + place :].any()
        alone = ranking(speculation, ids[: 9 + place], None)
        torch.testing.assert_close(weights[:, place, : 9 + place], alone, rtol=0.02, atol=1e-4)


def test_strict_keys_take_few_bits_and_the_newest_have_them():
    ids = prompt(64, 4)[0] % 50
    plain, strict = small(feature_sites=(), features=0), small(strict=True, feature_sites=(), features=0)
    each = {8: 4 * (6 + 2), 4: 4 * (3 + 2)}
    cases = [(each[8] * 64 * 2, 8, 64), (each[8] * 64 * 2 - 1, 4, 64), (each[4] * 20 * 2, 4, 20)]
    notes = {}
    plain.read(record(ids, None), notes, lambda n: n * 1e6)
    exact = keys_of(notes).float()
    for cap, bits, count in cases:
        notes, passing = {}, {}
        strict.read(record(ids, None), notes, lambda n, cap=cap: cap)
        assert keys_of(notes).shape == (4, count, 6 * bits // 8)
        assert sum(x.nbytes for name, x in notes.items() if name.startswith((KEYS, SCALE))) <= cap / 2
        held = strict._products(torch.eye(6).expand(4, -1, -1), notes).mT
        error = (held - exact[:, 64 - count :]).abs().amax(-1)
        # half a level of the scale, which is itself in half precision as the exact keys are
        assert (error <= 0.6 * exact[:, 64 - count :].abs().amax(-1) / (2 ** (bits - 1) - 1)).all()
        strict.begin(torch.tensor([7]), 64, notes, passing, lambda n, cap=cap: cap)
        assert passing[RANKING].first == 64 + 1 - keys_of(notes).shape[1]
        assert sum(x.nbytes for name, x in notes.items() if name.startswith((KEYS, SCALE))) <= cap / 2


def spans_at(positions: list[int]) -> FoldedSpans:
    """Units of one token each, at these positions."""
    spans = FoldedSpans(AttentionSite(0, "a", 0, 2, 2, 8, 8, 1.0), Components(host_form="none"), torch.float32)
    ones = torch.ones(len(positions), dtype=torch.int64)
    x = torch.zeros(2, len(positions), 8)
    spans.fold(Folding(x, x, Cut(torch.tensor(positions), ones.float(), ones)))
    return spans


def test_every_layer_gets_the_same_ranking_for_its_own_heads():
    weights = torch.rand(2, 3, 10)
    from semkv.runtime.step import Step

    for heads, groups in ((2, 2), (4, 1), (1, 4)):
        site = AttentionSite(0, "a", 0, heads * groups, heads, 8, 8, 1.0)
        step = Step.alone(site, torch.zeros(heads * groups, 3, 8))
        step.passing[RANKING] = Ranking(weights.log(), 5)
        made = SpeculativeRouter().score(site, step.q, spans_at([3, 5, 9, 14]), step)
        runs = SpeculativeRouter().score(site, step.q, spans_at([7, 8, 9, 10]), step)
        assert made.shape == runs.shape == (heads * groups, 3, 4)
        assert (made[..., 0] == float("-inf")).all()  # its key is gone
        for head in range(heads * groups):
            own = head // groups
            want = {2: weights[own % 2], 4: weights[own // 2], 1: weights.amax(0)}[heads]
            torch.testing.assert_close(made[head, :, 1:], want[:, [0, 4, 9]].log())
            torch.testing.assert_close(runs[head], want[:, 2:6].log())


# -- on the bundled model ------------------------------------------------------------------------------------------------


def check(row) -> None:
    assert row.traffic.peak_share <= 1
    assert row.device_nbytes() + row.charged_nbytes <= row.whole_cap(row.tokens)
    assert row.charged_nbytes == sum(x.nbytes for name, x in row.notes.items() if name.startswith((KEYS, SCALE)))


@pytest.mark.parametrize(
    ("budget", "options"),
    [
        (0.2, {}),
        (80, {"strict": True}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (0.25, {}),
                (0.15, {"strict": True}),
                (0.15, {"retrieval": "layers"}),
            )
        ),
    ],
)
def test_the_budget_is_a_hard_cap_with_the_heads_keys_in_it(whole, budget, options):
    settings = CompileConfig(floor=0, kv_dtype="float16")
    compiled = whole.with_method("specontext", budget, config=settings, **options)
    state = compiled.prefill(prompt(320, 5))
    check(state.rows[0])
    for count in (1, 9, 70):
        compiled.extend(state, prompt(count, 6))
        check(state.rows[0])
    compiled.generate(prompt(2, 7), state=state, max_new_tokens=8, do_sample=False)
    check(state.rows[0])
    if options.get("retrieval") != "layers":
        assert state.nbytes["device"] >= state.rows[0].charged_nbytes > 0
    assert 0 < state.stats.overlap <= 1


def test_too_small_a_budget_says_which_would_do(whole):
    with pytest.raises(BudgetError, match=r"own index of 500 tokens takes 3\.1% .* fraction of at least 0\.112"):
        whole.with_method("specontext", 0.1).prefill(prompt(500, 1))
    whole.with_method("specontext", 0.112).prefill(prompt(500, 1))
    with pytest.raises(BudgetError, match=r"is a number of tokens, .* strict=True"):
        whole.with_method("specontext", 200).prefill(prompt(500, 1))


def test_everything_in_the_budget_is_the_full_cache(whole):
    ids = prompt(120, 8)
    wanted = whole.generate(ids, max_new_tokens=12, do_sample=False)
    made = whole.with_method("specontext", 1.0).generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(made, wanted)


def test_what_layers_unfold_is_one_selection(whole):
    """Per KV head the same tokens in every layer; in a batch-level selection also in every head; generated ones as well."""
    for selection in ("head", "batch"):
        compiled = whole.with_method(
            "specontext",
            0.4,
            selection=selection,
            config=CompileConfig(floor=0, kv_dtype="float16"),
        )
        state = compiled.prefill(prompt(200, 9))
        for token in prompt(80, 10)[0]:
            compiled.extend(state, token[None, None])
        held = [
            [set(row[row >= 0].tolist()) for row in memory.slots.places] for (memory,) in state.rows[0].stores.values()
        ]
        assert all(heads == held[0] for heads in held)
        assert len(held[0][0]) > 20
        assert (held[0][0] == held[0][1]) == (selection == "batch")
        places = state.rows[0].stores[0][0].spans.tables.segment_position
        assert max(int(places[token]) for head in held[0] for token in head) >= 200


def test_a_row_alone_is_the_row_in_a_batch(whole):
    compiled = whole.with_method("specontext", 0.3)
    ids = [prompt(count, seed)[0] for count, seed in ((300, 1), (211, 2))]
    padded = torch.zeros(2, 300, dtype=torch.int64)
    mask = torch.zeros(2, 300, dtype=torch.int64)
    for row, own in enumerate(ids):
        padded[row, 300 - len(own) :], mask[row, 300 - len(own) :] = own, 1
    both = compiled.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False)[:, 300:]
    for row, own in enumerate(ids):
        alone = compiled.generate(own[None], max_new_tokens=8, do_sample=False)[:, len(own) :]
        assert torch.equal(both[row], alone[0])


def test_a_record_of_another_method_serves(whole):
    compiled = whole.with_method("specontext", 0.3)
    ids = prompt(200, 3)
    record = whole.prefill_record(ids)
    assert not record.features
    state, own = compiled.compress(record), compiled.prefill(ids)
    assert torch.equal(keys_of(state.rows[0].notes), keys_of(own.rows[0].notes))
    assert sorted(record.features) == [1]


def test_artifacts_and_states_keep_the_head(whole, tmp_path):
    compiled = whole.with_method("specontext", 0.3, selection="batch")
    ids = prompt(200, 4)
    compiled.save(tmp_path / "artifact")
    assert (tmp_path / "artifact" / "programs" / "selector.json").is_file()
    loaded = semkv.load(tmp_path / "artifact")
    made = [model.generate(ids, max_new_tokens=10, do_sample=False) for model in (compiled, loaded)]
    assert torch.equal(*made)
    state = compiled.prefill(ids)
    compiled.extend(state, prompt(90, 5))  # the last chunk's keys wait for the next step
    state.save(tmp_path / "state")
    other = loaded.load_state(tmp_path / "state")
    for model, one in ((compiled, state), (loaded, other)):
        model.extend(one, prompt(3, 6))
    torch.testing.assert_close(state.logits, other.logits, rtol=0, atol=0)
    for name, x in state.rows[0].notes.items():
        assert torch.equal(x, other.rows[0].notes[name])
    again = loaded.with_method("specontext", 0.3)
    assert again.program.selector is not None
    assert loaded.with_method("streaming_llm", 0.3).program.selector is None


def test_forks_go_their_own_way(whole):
    compiled = whole.with_method("specontext", 0.3)
    state = compiled.prefill(prompt(150, 1))
    fork = state.fork()
    compiled.extend(fork, prompt(5, 2))
    assert keys_of(state.rows[0].notes).shape[1] == 150
    assert keys_of(fork.rows[0].notes).shape[1] == 155


def test_it_needs_a_retrieval_head():
    with pytest.raises(ConfigError, match="needs a profile with a retrieval head"):
        SpeContext().check(None)
    SpeContext(retrieval="layers").check(None)
    with pytest.raises(ConfigError, match="'window' of method 'specontext' is 0"):
        find_method("specontext", {"window": 0})
