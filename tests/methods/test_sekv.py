"""SeKV's formulas with loops: Eq. 2, 3, 5 and 9, one softmax over four kinds of entries, the cap, grouped queries, ablations."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import semkv
from semkv.errors import ConfigError
from semkv.evaluation.samples import make_sample
from semkv.ir.site import AttentionSite
from semkv.kernels.mixed_attention import mixed_attention_reference
from semkv.methods import SeKV, find_method
from semkv.methods.forms import LowRankForms
from semkv.methods.paper_spans import PaperSpans
from semkv.methods.rank_gates import ProfileRankGates
from semkv.methods.routers import CoarseRouter, GateRouter, OracleRouter
from semkv.profiles.calibration.parameters import RouterParameters
from semkv.profiles.calibration.settings import CalibrationSettings
from semkv.runtime.components import Components, Summary
from semkv.runtime.decode.choosing import choose_units
from semkv.runtime.decode.join import stack_rows
from semkv.runtime.step import Step
from semkv.runtime.store.quantization import dequantize
from semkv.runtime.store.segments import Cut, Folding
from semkv.runtime.store.site_memory import SiteMemory
from semkv.runtime.store.spans import FoldedSpans
from semkv.runtime.store.token_store import TokenStore
from tests.eager_steps import eagerly

SITE = AttentionSite(index=0, name="layer", store=0, q_heads=4, kv_heads=2, key_dim=8, value_dim=6, scale=0.35)
PROGRAM = SimpleNamespace(sites=(SITE,))
LENGTHS = [5, 9, 3, 7]
KEPT, RECENT = 3, 4
FOLDED = sum(LENGTHS)
N = KEPT + FOLDED + RECENT
ALL = float("inf")


def gate(seed: int = 0, shared: bool = False) -> GateRouter:
    generator = torch.Generator().manual_seed(seed)
    return GateRouter(
        {0: torch.randn(4, 3, 8, generator=generator)},
        {0: torch.randn(4, generator=generator)},
        {0: torch.randn(4, generator=generator)},
        shared,
    )


def memory(router=None, **changes) -> tuple[SiteMemory, dict[str, torch.Tensor]]:
    """A store of kept tokens, folded spans of LENGTHS and a window, and the tokens that it was made of."""
    generator = torch.Generator().manual_seed(5)
    made = {
        "k": torch.randn(2, N, 8, generator=generator),
        "v": torch.randn(2, N, 6, generator=generator),
        "surprisal": torch.rand(N, generator=generator),
        "q": torch.randn(4, 1, 8, generator=generator),
    }
    summary = Summary(bits=8, **changes.pop("summary", {}))
    components = Components(summary=summary, router=router or gate(), host_form="raw", outside="folded", **changes)
    where = torch.arange(N)[None]
    stores = [
        TokenStore(made["k"][:, part], made["v"][:, part], where[:, part], 8)
        for part in (slice(0, KEPT), slice(N - RECENT, N))
    ]
    spans = FoldedSpans(SITE, components, torch.float32)
    inside = slice(KEPT, KEPT + FOLDED)
    lengths = torch.tensor(LENGTHS)
    spans.fold(
        Folding(made["k"][:, inside], made["v"][:, inside], Cut(where[0, inside], made["surprisal"][inside], lengths))
    )
    return SiteMemory(SITE, components, *stores, spans, device=torch.device("cpu")), made


def span_edges() -> list[tuple[int, int]]:
    ends = [KEPT + sum(LENGTHS[: place + 1]) for place in range(len(LENGTHS))]
    return [(end - length, end) for end, length in zip(ends, LENGTHS)]


def attend(entries, q: torch.Tensor) -> torch.Tensor:
    batched = stack_rows([entries], SITE, 1)
    return mixed_attention_reference(q[None], torch.tensor([[N]]), *batched, scale=SITE.scale)[0]


def coarse_means(made: dict[str, torch.Tensor], name: str, uniform: bool = False) -> torch.Tensor:
    """Eq. 2 and Sec. 3.2: surprisal-weighted means [Hkv, M, D] with loops."""
    rows = []
    for start, end in span_edges():
        weight = [1.0 if uniform else float(made["surprisal"][place]) for place in range(start, end)]
        total = sum(weight)
        rows.append(sum(made[name][:, place] * (w / total) for w, place in zip(weight, range(start, end))))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("routing", ["derived", "uniform"])
def test_gate_logits_are_those_of_equations_3_to_5(routing):
    router = gate()
    store, made = memory(router, summary={"routing": routing})
    means = coarse_means(made, "k", uniform=routing == "uniform")
    scores = router.score(SITE, made["q"], store.spans, Step.alone(SITE, made["q"]))
    for head in range(4):
        w = router.weights[0][head]
        for unit, length in enumerate(LENGTHS):
            summary = w @ means[head // 2, unit]
            summary = summary / summary.norm()
            logit = float((w @ made["q"][head, 0]) @ summary) / math.sqrt(3) + math.log(length)
            logit -= float(router.offsets[0][head]) + float(router.thresholds[0][head])
            assert float(scores[head, 0, unit]) == pytest.approx(logit, abs=0.05)


def test_spans_above_the_threshold_are_unfolded():
    """Eq. 9 without the fill: each query head by its own offset and threshold; a shared one replaces both by their mean over all layers."""
    seen = []
    for shared in (False, True):
        router = gate(shared=shared)
        router.weights[1], router.offsets[1], router.thresholds[1] = router.weights[0], torch.ones(4), torch.zeros(4)
        store, made = memory(router, fill=False)
        scores = router.score(SITE, made["q"], store.spans, Step.alone(SITE, made["q"]))
        zoom = choose_units(store.components, store.spans, SITE, scores, ALL).heads
        means = coarse_means(made, "k")
        both = [
            float(router.offsets[site][head] + router.thresholds[site][head]) for site in (0, 1) for head in range(4)
        ]
        for head in range(4):
            w, limit = router.weights[0][head], sum(both) / 8 if shared else both[head]
            for unit, length in enumerate(LENGTHS):
                summary = w @ means[head // 2, unit]
                raw = float((w @ made["q"][head, 0]) @ (summary / summary.norm())) / math.sqrt(3) + math.log(length)
                assert abs(raw - limit) > 0.05, "a case that rounding decides"
                assert bool(zoom[head, 0, unit]) == (raw > limit)
        assert 0 < int(zoom.sum()) < zoom.numel()
        seen.append(zoom)
    assert not torch.equal(*seen)


@pytest.mark.parametrize("fill", [True, False])
def test_over_the_cap_spans_are_kept_in_order_of_their_gate(fill):
    """Per KV head; a group's union is charged once."""
    router = gate(3)
    store, made = memory(router, fill=fill)
    scores = router.score(SITE, made["q"], store.spans, Step.alone(SITE, made["q"]))
    each = store.spans.token_nbytes()
    for tokens in (0, 4, 12, 17, 24):
        zoom = choose_units(store.components, store.spans, SITE, scores, 2 * tokens * each).heads
        for kv in range(2):
            group = slice(2 * kv, 2 * kv + 2)
            best = {unit: float(scores[group, 0, unit].max()) for unit in range(4)}
            wanted = [unit for unit in sorted(best, key=lambda unit: -best[unit]) if fill or best[unit] > 0]
            taken, used = [], 0
            for unit in wanted:
                if used + LENGTHS[unit] > tokens:
                    break
                taken.append(unit)
                used += LENGTHS[unit]
            union = zoom[group, 0].any(0)
            assert torch.nonzero(union)[:, 0].tolist() == sorted(taken)


def naive_attention(made: dict[str, torch.Tensor], zoom: torch.Tensor, coarse: bool = True) -> torch.Tensor:
    """With loops: anchors, window, the tokens of zoomed spans, and mean + log size for the others, in one softmax."""
    means = coarse_means(made, "k"), coarse_means(made, "v")
    rows = []
    for head in range(4):
        kv, q = head // 2, made["q"][head, 0]
        exact = [*range(KEPT), *range(N - RECENT, N)]
        pairs = []
        for unit, (start, end) in enumerate(span_edges()):
            if zoom[head, 0, unit]:
                exact += range(start, end)
            elif coarse:
                logit = float(q @ means[0][kv, unit]) * SITE.scale + math.log(LENGTHS[unit])
                pairs.append((logit, means[1][kv, unit]))
        pairs += [(float(q @ made["k"][kv, place]) * SITE.scale, made["v"][kv, place]) for place in exact]
        total = sum(math.exp(logit) for logit, _ in pairs)
        rows.append(sum(value * (math.exp(logit) / total) for logit, value in pairs))
    return torch.stack(rows)[:, None]


@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize("tokens", [0, 12, 1000])
def test_one_softmax_over_all_entries(fill, tokens):
    store, made = memory(gate(3), fill=fill)
    entries = store.entries(SITE, made["q"], 2.0 * tokens * store.spans.token_nbytes(), Step.alone(SITE, made["q"]))
    torch.testing.assert_close(attend(entries, made["q"]), naive_attention(made, store.zoomed), rtol=0, atol=0.02)
    if tokens == 1000 and fill:
        assert store.zoomed.all()
        exact = (
            torch.softmax((made["q"].unflatten(0, (2, 2)) @ made["k"][:, None].mT) * SITE.scale, -1)
            @ made["v"][:, None]
        )
        torch.testing.assert_close(attend(entries, made["q"]), exact.flatten(0, 1), rtol=1e-4, atol=1e-5)


def test_a_head_reads_only_the_spans_that_it_zoomed():
    """The union is on the device once per KV head, each query head has its own mask."""
    store, made = memory(gate(3), fill=False)
    entries = store.entries(SITE, made["q"], ALL, Step.alone(SITE, made["q"]))
    zoom = store.zoomed
    groups = zoom.unflatten(0, (2, 2))
    assert (groups[:, 0] != groups[:, 1]).any(), "heads of a group that differ"
    union = groups.any(dim=(1, 2))
    held = sum(LENGTHS[unit] for unit in range(4) if bool(union[:, unit].any()))
    unfolded, (*plain, bias, _) = entries.block_k[-2], entries.block_bias
    assert [part.shape[1] for part in entries.block_k[:-2]] == [KEPT, RECENT]
    assert plain == [None, None]
    assert unfolded.shape[1] == store.slots.positions.shape[1] <= -(-held // 32) * 32
    most = [sum(LENGTHS[unit] for unit in range(4) if bool(union[kv, unit])) for kv in range(2)]
    assert (store.slots.places >= 0).sum(1).tolist() == most
    seen = (bias == 0)[:, 0].sum(-1)
    assert seen.tolist() == [sum(LENGTHS[unit] for unit in range(4) if bool(zoom[head, 0, unit])) for head in range(4)]


def test_without_coarse_entries_folded_spans_are_unseen():
    store, made = memory(gate(3), summary={"attend": False}, fill=False)
    entries = store.entries(SITE, made["q"], ALL, Step.alone(SITE, made["q"]))
    assert entries.block_k_scale is None
    expected = naive_attention(made, store.zoomed, coarse=False)
    torch.testing.assert_close(attend(entries, made["q"]), expected, rtol=0, atol=1e-4)


def test_without_unfolding_everything_is_coarse():
    store, made = memory(gate(3), unfold=False)
    entries = store.entries(SITE, made["q"], ALL, Step.alone(SITE, made["q"]))
    nothing = torch.zeros(4, 1, 4, dtype=torch.bool)
    assert store.workspace_nbytes == 0
    assert not store.spans.index
    torch.testing.assert_close(attend(entries, made["q"]), naive_attention(made, nothing), rtol=0, atol=0.02)


def test_the_coarse_router_scores_by_the_direction_of_the_mean_key():
    store, made = memory(CoarseRouter())
    scores = CoarseRouter().score(SITE, made["q"], store.spans, Step.alone(SITE, made["q"]))
    means = dequantize(store.spans.mean_k)
    for head in range(4):
        for unit in range(len(LENGTHS)):
            direction = means[head // 2, unit] / means[head // 2, unit].norm()
            logit = float(made["q"][head, 0] @ direction)
            assert float(scores[head, 0, unit]) == pytest.approx(logit, abs=1e-4)


def test_the_oracle_scores_by_attention_mass():
    store, made = memory(OracleRouter())
    scores = OracleRouter().score(SITE, made["q"], store.spans, Step.alone(SITE, made["q"]))
    inside = made["k"][:, KEPT : KEPT + FOLDED]
    for head in range(4):
        weights = ((inside[head // 2] @ made["q"][head, 0]) * SITE.scale).softmax(0)
        for unit, (start, end) in enumerate(span_edges()):
            mass = float(weights[start - KEPT : end - KEPT].sum())
            assert float(scores[head, 0, unit]) == pytest.approx(math.log(mass), abs=1e-3)


SWITCHES = {
    "fixed chunks": ({"entropy": False}, {"segmenter"}),
    "no anchors": ({"anchors": False}, {"segmenter"}),
    "no surprisal weights": ({"weights": "uniform"}, {"summary"}),
    "coarse entries": ({"coarse": True}, {"summary"}),
    "no SVD": ({"unfold": False, "coarse": True}, {"unfold", "summary"}),
    "raw spans": ({"forms": "raw"}, {"forms", "host_form"}),
    "thresholds only": ({"fill": False}, {"fill"}),
    "fixed share": ({"fixed_share": 0.9}, {"fixed_share"}),
}
"""The ablations of the paper and our own: what a switch changes of the composition, and nothing else."""


@pytest.mark.parametrize("name", list(SWITCHES))
def test_a_switch_changes_what_it_says_and_only_that(name):
    options, changed = SWITCHES[name]
    plain = SeKV(router="coarse")
    before = plain.components(PROGRAM, None)
    after = plain.with_options(options).components(PROGRAM, None)
    differing = {
        field for field in vars(before) if field != "router" and getattr(before, field) != getattr(after, field)
    }
    assert differing == changed


@pytest.mark.parametrize("options", [{"min_span": 4}, {"preset": "paper"}, {"preset": "paper", "alpha": 2.0}])
def test_what_the_switches_of_segmentation_do(options):
    surprisal = torch.rand(1200, generator=torch.Generator().manual_seed(1)) ** 9 * 9

    def divided(**changes):
        return SeKV().with_options(options | changes).segmenter().divide(surprisal, 190.0, 0.9, 1)

    plain, chunks, bare = divided(), divided(entropy=False), divided(anchors=False)
    sinks = SeKV().with_options(options).sinks
    assert len(plain.kept) > sinks + 10
    assert len(bare.kept) < len(plain.kept)
    assert len(chunks.kept) == len(plain.kept)
    assert float(chunks.lengths.float().mean()) == float(plain.lengths.float().mean()), "matched in mean size"
    assert int(chunks.lengths.max() - chunks.lengths.min()) <= 2
    assert len(set(plain.lengths.tolist())) > 5


def test_the_papers_preset():
    """Its constants; options beside it have the last word, and an unknown one is named."""
    paper = SeKV().with_options({"preset": "paper"})
    segmenter = paper.segmenter()
    assert isinstance(segmenter, PaperSpans)
    assert (segmenter.alpha, segmenter.min_span, segmenter.window, segmenter.fold_chunk) == (1.0, 16, 512, 16)
    assert (paper.forms, paper.max_rank, paper.fill, paper.bits) == ("factored", 32, False, 16)
    assert SeKV().with_options({"preset": "paper", "max_rank": 8}) == replace(paper, max_rank=8)
    with pytest.raises(ConfigError, match="option 'preset' of method 'sekv' is 'papers'; expected one of 'paper'"):
        find_method("sekv", {"preset": "papers"})
    with pytest.raises(
        ConfigError, match="'preset' of method 'quest' is 'paper'; expected no preset: this method has none"
    ):
        find_method("quest", {"preset": "paper"})
    with pytest.raises(ConfigError, match="option 'min_span' of method 'sekv' is 99; expected 1 to max_span"):
        find_method("sekv", {"preset": "paper", "min_span": 99})


@pytest.mark.parametrize("options", [{"shared_threshold": True}, {"routing": "mean"}])
@pytest.mark.parametrize("router", ["coarse", "oracle"])
def test_switches_of_the_gate_need_one(router, options):
    (name,) = options
    with pytest.raises(ConfigError, match=f"option '{name}' of method 'sekv' is .*; expected .* has no gate"):
        SeKV(router=router, **options).check(None)
    parts = SeKV(router="initial", **options).components(PROGRAM, None)
    assert parts.router.shared_threshold or parts.summary.routing == "uniform"


def test_the_initial_gate_is_where_training_begins():
    """Of a W that began as the identity, as the bundled profile's did."""
    program = SimpleNamespace(sites=(replace(SITE, treatment="method"),))
    began = RouterParameters(program.sites[0], CalibrationSettings(router_init="identity"))
    router = SeKV(router="initial").components(program, None).router
    for own, start in (
        (router.weights, began.router),
        (router.offsets, began.offset),
        (router.thresholds, began.threshold),
    ):
        torch.testing.assert_close(own[0], start.detach())
    store, made = memory(router)
    scores = router.score(SITE, made["q"], store.spans, Step.alone(SITE, made["q"]))
    means = coarse_means(made, "k")
    direction = means[1, 2] / means[1, 2].norm()
    logit = float(made["q"][3, 0] @ direction) / math.sqrt(8) + math.log(LENGTHS[2]) - math.log(0.05 / 0.95)
    assert float(scores[3, 0, 2]) == pytest.approx(logit, abs=0.05)


def test_an_untrained_router_is_random_and_the_same_every_time():
    first, second = (SeKV(router="untrained").components(PROGRAM, None).router for _ in range(2))
    assert torch.equal(first.weights[0], second.weights[0])
    assert first.weights[0].shape == (4, 2, 8)


def test_trained_routing_needs_a_profile():
    with pytest.raises(
        ConfigError, match="needs a profile with a trained router: make one with `semkv-profile MODEL -o OUT`"
    ):
        SeKV(router="trained").components(PROGRAM, None)
    assert isinstance(SeKV().components(PROGRAM, None).router, CoarseRouter)
    assert SeKV().notes(None) == ()
    with pytest.raises(ConfigError, match="option 'min_span' of method 'sekv' is 99; expected 1 to max_span"):
        SeKV().with_options({"min_span": 99})


# -- on a whole model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole():
    """The bundled model with its profile."""
    return semkv.compile(semkv.bundled.load()[0], semkv.bundled.profile(), method="full")


@pytest.fixture(scope="module")
def haystack():
    tokenizer = semkv.bundled.load()[1]
    return torch.tensor([make_sample(tokenizer, "dense", 1100, 0, seed=0, questions=1).ids])


def sekv(whole, budget: float, **options):
    return whole.with_method("sekv", budget, config=semkv.CompileConfig(floor=0), **options)


def test_without_a_profile_it_runs(haystack):
    model = semkv.bundled.load()[0]
    compiled = semkv.compile(model, method="sekv", budget=0.1, config=semkv.CompileConfig(floor=0))
    state = compiled.prefill(haystack)
    compiled.extend(state, haystack[:, :1])
    assert "standard deviations above the mean surprisal" in semkv.explain(compiled, state)


@pytest.mark.parametrize(
    "options",
    [
        {"max_rank": 64},
        *(pytest.param(x, marks=pytest.mark.slow) for x in ({"max_rank": 24}, {"shared_threshold": True})),
    ],
)
def test_the_papers_preset_runs_on_the_bundled_profile(whole, haystack, options):
    """Ranks beyond those that the gates were trained for are kept by their energy; the budget holds."""
    compiled = sekv(whole, 0.25, preset="paper", **options)
    if "max_rank" in options:
        (note,) = compiled.method.notes(whole.profile)
        assert note.startswith(
            f"rank gates know the first 20 components of a span; further ones, up to max_rank {options['max_rank']},"
        )
    state = compiled.prefill(haystack)
    compiled.extend(state, haystack[:, :6])
    assert state.stats.peak_share <= 1
    spans = state.rows[0].stores[1][0].spans
    assert spans.has_factors
    assert isinstance(spans.mean_k, torch.Tensor)
    if options.get("max_rank") == 64:
        assert int(spans.host_factors.key_rank.max()) > 20


def test_gates_beyond_the_trained_ones_are_energies(whole):
    gates = ProfileRankGates(whole.profile)
    assert gates.trained == 20
    site = whole.program.stores[0]
    torch.manual_seed(0)
    k, v = torch.randn(2, site.kv_heads, 40, site.key_dim)
    k[:, :] = k[..., :1] * torch.linspace(1, 2, site.key_dim) + 1e-3 * k  # one strong component
    forms = LowRankForms(64, gates, 0.01, only_if_smaller=False)
    starts, lengths = torch.tensor([0]), torch.tensor([40])
    (heads,) = forms.factorize_spans(site, k, v, starts, lengths, k.mean(1, keepdim=True)).values()
    assert {len(head["key_s"]) for head in heads} <= set(range(1, 21)), "what adds nothing is dropped beyond the 20th"
    assert {len(head["value_s"]) for head in heads} == {40}, "noise needs all of them"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_factors_are_sized_in_the_kv_dtype(dtype):
    """48 tokens of rank r, D = 64, in float32 or float16 against 8-bit tokens of 66 bytes."""
    site = AttentionSite(index=0, name="x", store=0, q_heads=2, kv_heads=2, key_dim=64, value_dim=64, scale=1.0)
    torch.manual_seed(0)
    for rank in (4, 10, 13, 16, 20):
        x = (torch.randn(2, 48, rank) @ torch.randn(2, rank, 64)).to(dtype)
        factors = rank * (48 + 64 + 1) * dtype.itemsize
        found = LowRankForms(32).factorize_spans(
            site, x, x, torch.tensor([0]), torch.tensor([48]), x.mean(1, keepdim=True)
        )
        assert bool(found) == (factors < 48 * 66), rank


def test_short_spans_are_factored_where_one_rank_says_enough():
    """Spans of 4 to 12 tokens a little off one direction, in float32 against 8-bit tokens: by singular values in double precision."""
    site = AttentionSite(index=0, name="x", store=0, q_heads=2, kv_heads=2, key_dim=64, value_dim=64, scale=1.0)
    torch.manual_seed(0)
    lengths = torch.randint(4, 13, (200,))
    ends = lengths.cumsum(0)
    n = int(ends[-1])
    off = 0.06 * torch.rand(200).repeat_interleave(lengths)[None, :, None]
    k, v = torch.randn(2, 2, n, 1) * torch.randn(64) + off * torch.randn(2, 2, n, 64)
    wanted = []
    for number, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist())):
        ranks = 0
        for x in (k, v):
            energies = torch.linalg.svdvals(x[:, end - length : end].double()).square()
            shares = energies.cumsum(-1) / energies.sum(-1, keepdim=True)
            ranks += int(((shares - 1 + 0.02**2) < 0).sum() + len(shares))
        if ranks * (length + 65) * 4 < 4 * length * 66:
            wanted.append(number)
    found = LowRankForms(32).factorize_spans(
        site, k, v, ends - lengths, lengths, torch.stack([x.mean(1) for x in k.split(lengths.tolist(), 1)], 1)
    )
    assert 20 < len(wanted) < 180
    assert sorted(found) == wanted


@pytest.mark.parametrize("options", [{}, pytest.param({"preset": "paper"}, marks=pytest.mark.slow)])
def test_generated_tokens_are_cut_where_they_surprise(whole, haystack, options, tmp_path):
    """Against the prompt's boundary, token by token; every token stays in one place; a saved state goes on alike."""
    compiled = sekv(whole, 0.25, router="coarse", **options)
    state = compiled.prefill(haystack[:, :700])
    memory = state.rows[0].stores[1][0]
    before, kept, level = memory.recent.positions[0, 0], set(memory.kept.positions[0].tolist()), memory.boundary.nats
    surprisal, tokens = {}, haystack[0, 700:820]
    for at, token in enumerate(tokens):
        surprisal[700 + at] = float(torch.nn.functional.cross_entropy(state.logits, token[None]))
        compiled.extend(state, token[None, None])
        if at == 90:
            state.save(tmp_path / "state")
            state = compiled.load_state(tmp_path / "state")
            memory = state.rows[0].stores[1][0]
            assert memory.boundary.nats == level
    spans = memory.spans
    runs = [(int(p), int(p + n)) for p, n in zip(spans.tables.segment_position, spans.tables.segment_length)]
    folded = [place for start, end in runs for place in range(start, end)]
    exact = memory.kept.positions[0].tolist()
    assert sorted([*folded, *exact, *memory.recent.positions[0].tolist()]) == list(range(820))
    units = {}
    for unit, (start, end) in zip(spans.tables.segment_unit[0].tolist(), runs):
        low, high = units.get(unit, (start, end))
        units[unit] = (min(low, start), max(high, end))
    begins = [low for low, _ in units.values() if low > int(before) and low in surprisal]
    assert begins
    told = [low for low in begins if surprisal[low] >= level or low - 1 in set(exact)]
    assert told, "spans that begin where the text surprises"
    for place in set(exact) - kept:
        assert place not in surprisal or surprisal[place] >= level or options, "anchors surprise"


def test_spans_that_become_factors_while_tokens_follow(whole, haystack, monkeypatch):
    """The step in which the first of them is folded asks the memory, as those behind it do."""
    compiled = sekv(whole, 0.15, router="coarse")
    slow = eagerly(sekv(whole, 0.15, router="coarse"))
    state, asking = (one.prefill(haystack[:, :700]) for one in (compiled, slow))
    also = state.fork()
    assert not any(memory.spans.has_factors for memory in state.rows[0].memories())
    plain = LowRankForms.factorize_spans
    monkeypatch.setattr(
        LowRankForms,
        "factorize_spans",
        lambda self, *given: plain(replace(self, only_if_smaller=False, max_rank=4), *given),
    )
    for token in haystack[0, 700:740]:
        found = compiled.extend(state, token[None, None])
        torch.testing.assert_close(found, slow.extend(asking, token[None, None]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[0], compiled.step([also], token[None]), rtol=1e-4, atol=1e-4)
    assert any(memory.spans.has_factors for memory in state.rows[0].memories())


@pytest.mark.parametrize("options", [{}, {"max_rank": 5, "coarse": False}], ids=str)
def test_factors_are_read_by_a_steps_graph_where_they_wait(whole, haystack, options, tmp_path, monkeypatch):
    """Token by token as the memory's entries give it, which copies and pads them (what padding takes is not counted here): logits, what
    crosses a link, and what was there; alone, beside another row, forked and saved."""
    monkeypatch.setattr(FoldedSpans, "factored_nbytes", lambda self, segments: 0)
    compiled = sekv(whole, 0.6, preset="paper", **options)
    slow = eagerly(sekv(whole, 0.6, preset="paper", **options))
    state, asking = (one.prefill(haystack[:, :600]) for one in (compiled, slow))
    other = compiled.prefill(haystack[:, 50:450])
    alone = other.fork()
    assert all(memory.spans.all_factors for memory in state.rows[0].memories() if memory.spans.count)
    assert state.steps_as_graph(1), "no step asks the memory"
    tokens = haystack[0, 600:660]
    for at, token in enumerate(tokens):
        if at == 30:
            state.save(tmp_path / "state")
            state = compiled.load_state(tmp_path / "state")
            other, before = other.fork(), other
            compiled.extend(before, token[None, None])
        found, expected = compiled.step([state, other], token.expand(2)), slow.extend(asking, token[None, None])
        torch.testing.assert_close(found[0], expected[0, 0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[1], compiled.extend(alone, token[None, None])[0, 0], rtol=1e-4, atol=1e-4)
        if at == 20:
            for name in ("moved_bytes_per_step", "overlap"):
                assert getattr(state.stats, name) == pytest.approx(getattr(asking.stats, name), rel=0.05), name
            assert state.stats.overlap > 0
    assert state.stats.peak_share <= 1
    assert state.steps_as_graph(1)
    memories = list(state.rows[0].memories())
    assert any(memory.factors.nbytes for memory in memories)
    assert not any(memory.factors.there for memory in memories), "none was copied"
