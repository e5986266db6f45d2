"""SentenceKV: what is retained, how buckets are ranked, against loops; budget, states."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from semkv import bundled
from semkv.api import compile as compile_model
from semkv.config import CompileConfig
from semkv.errors import ConfigError
from semkv.ir.site import AttentionSite
from semkv.methods import SentenceKV, find_method
from semkv.methods.pages import Frame
from semkv.methods.sentencekv import SentenceBuckets, SentenceRouter
from semkv.methods.sentences import sentence_classes, sentence_ends
from semkv.profiles.schema import Profile, SentenceSection
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.step import Step
from tests.eager_steps import eagerly

SITE = AttentionSite(index=0, name="layer", store=0, q_heads=6, kv_heads=3, key_dim=7, value_dim=5, scale=0.4)
STOP = 9
CLASSES = torch.full((10,), 1 * 16 + 1, dtype=torch.uint8)  # words with their own white space
CLASSES[STOP] = 4 + 16 * 3  # a full stop


def with_sentences(profile: Profile, tokenizer) -> Profile:
    vocab = profile.info.model.vocab_size
    classes = torch.nn.functional.pad(sentence_classes(tokenizer), (0, vocab - len(tokenizer)))
    section = SentenceSection(tokens=len(tokenizer), marks=1, mean_tokens=10, longest=30, samples=1)
    info = profile.info.model_copy(update={"sentences": section})
    return Profile(info, profile.tensors | {"sentences.classes": classes})


@pytest.fixture(scope="module")
def whole():
    model, tokenizer = bundled.load()
    profile = with_sentences(bundled.profile(), tokenizer)
    return compile_model(model, profile, method="full", config=CompileConfig(floor=0, kv_dtype="float16", cache=True))


@pytest.fixture(scope="module")
def text():
    from semkv.profiles.bundled.tasks import make_text

    _, tokenizer = bundled.load()
    return lambda tokens, seed: tokenizer(make_text(tokens + 40, seed), return_tensors="pt")["input_ids"][:, :tokens]


def record(n: int) -> RowRecord:
    generator = torch.Generator().manual_seed(n)
    ids = torch.randint(0, STOP, (n,), generator=generator)
    ids[::7] = STOP
    out = RowRecord(ids=ids)
    out.keys[0] = torch.randn(3, n, 7, generator=generator)
    out.queries[0] = torch.randn(6, min(n, 64), 7, generator=generator)
    return out


def votes(of: RowRecord, window: int, kernel: int) -> list[float]:
    """Softmax mass over the window and all heads, then the most of `kernel` neighbours."""
    n, mass = of.tokens, [0.0] * of.tokens
    for head in range(6):
        for at in range(n - window, n):
            scores = [float(of.queries[0][head, at - n] @ of.keys[0][head // 2, j]) * SITE.scale for j in range(at + 1)]
            total = sum(map(math.exp, scores))
            for j, score in enumerate(scores):
                mass[j] += math.exp(score) / total
    half = kernel // 2
    return [max(mass[max(0, j - half) : j + half + 1]) for j in range(n)]


@pytest.mark.parametrize(("room", "keep"), [(64.0, 1.5), (80.0, 1.0), (64.0, 0.0)])
def test_the_best_of_the_whole_prompt_are_retained_in_their_sentences(room, keep):
    of = record(211)
    segmenter = SentenceBuckets(CLASSES, keep, 16, 5, longest=12, frame=Frame(16, 32, share=1 / 4))
    parts = segmenter.segment(of, SITE, room, 0.3, 8)
    first, recent = len(parts.kept), parts.recent
    assert (first, recent) == (int(room / 4) // 8 * 8, 211 - int(room / 4) // 8 * 8)
    count = int(keep * room * 2) - first - (211 - recent) if keep else recent - first
    scores = votes(of, 16, 5)
    best = sorted(range(first, recent), key=lambda j: -scores[j])[:count]
    assert sorted(scores[j] for j in parts.folded.tolist()) == pytest.approx(sorted(scores[j] for j in best), rel=1e-4)
    number, sentence = [], 0
    for end in sentence_ends(of.ids, CLASSES).tolist():
        number.append(sentence)
        sentence += end
    units = parts.units[0].repeat_interleave(parts.lengths).tolist()
    by_unit: dict[int, set[int]] = {}
    for token, unit in zip(parts.folded.tolist(), units):
        by_unit.setdefault(unit, set()).add(number[token])
    assert sorted(by_unit) == list(range(len(by_unit)))
    assert all(len(found) == 1 for found in by_unit.values())
    assert len(set.union(*by_unit.values())) == len(by_unit)


def test_neighbours_are_joined_where_their_means_do_not_fit():
    parts = SentenceBuckets(CLASSES, 0.0, frame=Frame(8, 16)).segment(record(211), SITE, 60.0, 4.0, 8)
    most = int((60 - 16 - 8 - 8) / 4)
    assert most / 2 < int(parts.units.max()) + 1 <= most
    assert int(parts.lengths.sum()) == parts.recent - len(parts.kept)


def test_buckets_may_be_chunks():
    segmenter = SentenceBuckets(None, longest=5)
    assert segmenter.buckets(torch.zeros(12, dtype=torch.int64)).tolist() == [5, 5, 2]


@pytest.mark.parametrize("cuts", [(1,) * 12, (5, 7), (12,)])
def test_the_query_is_the_mean_of_the_sentence_so_far(cuts):
    generator = torch.Generator().manual_seed(3)
    ids = torch.tensor([1, 2, STOP, 3, STOP, 4, 5, 6, STOP, 7, 8, 1])
    q = torch.randn(6, 12, 7, generator=generator)
    expected, sentence = [], []
    for place in range(12):
        if place and int(ids[place - 1]) == STOP:
            sentence = []
        sentence.append(q[:, place])
        expected.append(sum(sentence) / len(sentence))
    router, notes, got, at = SentenceRouter(8, classes=CLASSES), {}, [], 0
    for cut in cuts:
        step = Step(ids[at : at + cut], 100 + at, SITE, q[:, at : at + cut], notes=notes)
        got.append(router.sentence_queries(SITE, q[:, at : at + cut], step))
        at += cut
    torch.testing.assert_close(torch.cat(got, 1), torch.stack(expected, 1))
    assert notes["sentence.0"].tolist()[1] == 3


def test_the_nearest_sentences_are_recalled(whole, text):
    """Each KV head recalls buckets in order of the best product of a query head's mean query and the bucket's mean key."""
    compiled = eagerly(whole.with_method("sentencekv", budget=100, bits=16, recoverable=True))
    state = compiled.prefill(text(300, 1))
    (memory,) = state.rows[0].stores[1]
    seen = []
    plain = SentenceRouter.sentence_queries

    def look(self, site, q, step):
        mean = plain(self, site, q, step)
        if site.index == memory.site.index:
            seen.append(mean)
        return mean

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SentenceRouter, "sentence_queries", look)
        compiled.extend(state, text(300, 2)[:, 1:2])
    tokens = memory.spans.host_tokens
    k = torch.stack([tokens.keys(head, torch.arange(tokens.length)) for head in range(memory.site.kv_heads)])
    unit = memory.spans.tables.segment_unit[0].repeat_interleave(memory.spans.tables.segment_length)
    site = memory.site
    for head in range(site.kv_heads):
        best = []
        for number in range(memory.spans.count):
            mean = k[head, unit == number].float().mean(0)
            logits = [float(seen[0][head * site.group_size + g, 0] @ mean) * site.scale for g in range(site.group_size)]
            best.append(logits)
        norm = [math.log(sum(math.exp(row[g]) for row in best)) for g in range(site.group_size)]
        order = sorted(range(len(best)), key=lambda m: -max(best[m][g] - norm[g] for g in range(site.group_size)))
        chosen = memory.zoomed[head * site.group_size : (head + 1) * site.group_size, 0].any(0)
        assert set(order[: int(chosen.sum())]) == set(torch.nonzero(chosen)[:, 0].tolist())
        assert 0 < int(chosen.sum()) < len(best)


def test_sentences_that_leave_the_window_are_whole_units(whole, text, tmp_path):
    """A unit is a sentence, whatever the steps and chunks its tokens came in, and in a state that was stored in between."""
    compiled = whole.with_method("sentencekv", budget=400, recoverable=True, longest=40)
    ids = torch.cat([text(200, 1), text(230, 2)], 1)
    state, at = compiled.prefill(ids[:, :200]), 200
    for step, size in enumerate([1, 9, 30, 2, 17, 8, 50, 1, 1, 40, 71]):
        compiled.extend(state, ids[:, at : at + size])
        at += size
        if step == 4:
            state.save(tmp_path / "state")
            state = compiled.load_state(tmp_path / "state")
    assert at == 430
    classes = compiled.profile.tensors["sentences.classes"]
    sentence = (torch.cumsum(sentence_ends(ids[0], classes), 0) - sentence_ends(ids[0], classes).long()).tolist()
    for memory in state.rows[0].budgeted():
        spans = memory.spans
        segments = zip(
            spans.tables.segment_unit[0].tolist(),
            spans.tables.segment_position.tolist(),
            spans.tables.segment_length.tolist(),
        )
        units: dict[int, list[int]] = {}
        for unit, position, length in segments:
            units.setdefault(unit, []).extend(range(position, position + length))
        assert sorted(token for unit in units.values() for token in unit) == list(range(32, at - memory.recent.length))
        assert all(len({sentence[token] for token in unit}) == 1 for unit in units.values())
        for one, other in itertools.pairwise(units.values()):
            assert sentence[one[-1]] != sentence[other[0]] or len(one) + min(len(other), 8) > 40
        assert spans.lengths[0].tolist() == [len(unit) for unit in units.values()]


def test_a_sentence_goes_on_only_with_what_it_follows_on():
    segmenter = SentenceBuckets(CLASSES, longest=12)
    ids = torch.tensor([1, 2, STOP, 3, 4, 5, 6, STOP, 1, 1])

    def on(count, end=None):
        return segmenter.segment_on(segmenter.state_behind(ids[:count]), ids[count:end])

    assert not on(0, 3)[1]
    assert on(2, 4)[1]
    parts, goes_on, state = on(5)
    assert goes_on
    assert state == segmenter.state_behind(ids)
    assert parts.lengths.tolist() == [3, 2]
    assert not on(3)[1]


def test_chunks_go_on_until_they_are_full():
    """Whatever leaves the window at once, chunks begin where those of one prompt would."""
    segmenter = SentenceBuckets(None, longest=12)
    ids, state, at, lengths = torch.arange(100), segmenter.state_behind(torch.arange(5)), 5, [5]
    for size in (8, 8, 1, 30, 7, 8, 8, 25):
        parts, goes_on, state = segmenter.segment_on(state, ids[at : at + size])
        first, *rest = parts.lengths.tolist()
        lengths[-1] += first if goes_on else 0
        lengths += rest if goes_on else [first, *rest]
        at += size
    assert at == 100
    assert lengths == segmenter.buckets(ids).tolist()


OPTIONS = {
    "faithful": {},
    "recoverable": {"recoverable": True},
    "token": {"query": "token"},
    "chunks": {"buckets": "chunks"},
}


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_the_budget_holds_and_only_the_faithful_mode_drops(whole, text, kind, held):
    compiled = whole.with_method("sentencekv", budget=0.3, **OPTIONS[kind])
    state = compiled.prefill(text(280, 1))
    for seed in range(4):
        compiled.extend(state, text(20, seed))
        row = state.rows[0]
        assert held(row) == row.device_nbytes() <= row.cap_bytes(row.tokens)
    assert state.stats.peak_share <= 1
    assert state.stats.moved_bytes_per_step > 0
    for memory in state.rows[0].budgeted():
        stored = memory.kept.length + memory.recent.length + memory.spans.host_tokens.length
        assert stored == 360 if kind == "recoverable" else stored <= 0.3 * 280 * 3 + 80


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_states_go_on(whole, text, kind, tmp_path):
    compiled = whole.with_method("sentencekv", budget=0.4, **OPTIONS[kind])
    state = compiled.prefill(text(240, 240))
    compiled.extend(state, text(9, 3))
    assert bool(state.rows[0].notes) == (kind != "token")
    state.save(tmp_path / "state")
    again, fork = compiled.load_state(tmp_path / "state"), state.fork()
    more = text(20, 4)
    logits = compiled.extend(state, more, all_logits=True)
    assert torch.equal(logits, compiled.extend(again, more, all_logits=True))
    assert torch.equal(logits, compiled.extend(fork, more, all_logits=True))


def test_with_room_for_everything_it_is_full_attention(whole, text):
    compiled = whole.with_method("sentencekv", budget=1200, recoverable=True, fixed_share=0.2)
    state, reference = compiled.prefill(text(300, 5)), whole.prefill(text(300, 5))
    assert any(memory.spans.count > 3 for memory in state.rows[0].budgeted())
    question = text(4, 6)
    got, expected = compiled.extend(state, question), whole.extend(reference, question)
    assert float((got.softmax(-1) - expected.softmax(-1)).abs().max()) < 0.03


def test_a_profile_without_sentences_is_refused():
    bare = bundled.profile()
    bare = replace(
        bare,
        info=bare.info.model_copy(update={"sentences": None}),
        tensors={name: x for name, x in bare.tensors.items() if not name.startswith("sentences.")},
    )
    for profile in (None, bare):
        with pytest.raises(
            ConfigError, match=r"needs a profile with sentences: make it with `semkv-profile MODEL --steps"
        ):
            SentenceKV().check(profile)
        SentenceKV(buckets="chunks", query="token").check(profile)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"r": 0.5}, "option 'r' of method 'sentencekv' is 0.5; expected a number of at least 1"),
        ({"kernel": 4}, "option 'kernel' .* is 4; expected an odd width"),
        ({"window": 65}, "option 'window' .* is 65; expected 1 to 64 queries"),
        ({"bits": 5}, "option 'bits' .* is 5; expected 4, 8 or 16"),
        ({"longest": 0}, "option 'longest' .* is 0; expected at least 1"),
    ],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        find_method("sentencekv", options)


@pytest.mark.parametrize(
    "layers", [1, pytest.param(8, marks=pytest.mark.slow), pytest.param(24, marks=pytest.mark.slow)]
)
def test_a_budget_recalls_the_same_share_at_any_depth(layers):
    """Ranking selects: of what waits, a layer recalls what its own part of the budget holds, however many layers there are."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 97,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes)).eval()
    compiled = compile_model(model, method="full", config=CompileConfig(floor=0, kv_dtype="float16"))
    ids = torch.randint(3, 97, (1, 1200), generator=torch.Generator().manual_seed(1))
    record, shares = compiled.prefill_record(ids), []
    for r in (1.0, 2.0, 3.0):
        plain = {"buckets": "chunks", "query": "token", "r": r}
        compressing = compiled.with_method("sentencekv", 0.1, config=compiled.settings, **plain)
        state = compressing.compress(record)
        compressing.extend(state, ids[:, :1])
        own = [m.slots.filled / m.spans.host_tokens.length for m in state.rows[0].budgeted()]
        assert max(own) - min(own) < 0.15
        shares.append(max(own))
        assert state.stats.attended_share <= 0.1
    assert shares[0] < 1, "even what r = 1 retains does not all come back"
    assert shares[0] > 1.4 * shares[1] > 1.4 * 1.2 * shares[2]
    assert shares[2] < 0.4
