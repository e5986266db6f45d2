"""Far attention that a choice catches, against a plain computation from the tensors that the runtime hands to its operator."""

import pytest
import torch

from semkv import bundled
from semkv import compile as compile_model
from semkv.config import CompileConfig
from semkv.evaluation import Grid, Variant, evaluate
from semkv.evaluation.attention_mass import SINKS, WINDOW, MassWatch
from semkv.evaluation.plots import mass_heatmap
from semkv.evaluation.tables import markdown
from semkv.runtime.state import State

TOKENS, NEW = 300, 5


@pytest.fixture(scope="module")
def subject():
    model, tokenizer = bundled.load()
    compiled = compile_model(model, bundled.profile(), method="full", config=CompileConfig(floor=0))
    torch.manual_seed(1)
    ids = torch.randint(10, len(tokenizer) - 10, (1, TOKENS + NEW))
    return compiled, tokenizer, ids


def seen_positions(entries, q_heads, group, tokens):
    """bool [Hq, tokens] of a step of one token: exact entries that are not masked, from what `mixed_attention` is given."""
    held = torch.zeros(q_heads, tokens, dtype=torch.bool, device="cpu")
    biases = entries.block_bias or [None] * len(entries.block_k)
    for place, (k, positions, bias) in enumerate(zip(entries.block_k, entries.block_positions, biases)):
        first = 0 if entries.block_heads is None else entries.block_heads[place]
        at = positions[0].long().expand(k.shape[1], -1).repeat_interleave(group, 0)
        real = (at >= 0) & (at < tokens)
        if bias is not None:
            assert set(bias.unique().tolist()) <= {0.0, float("-inf")}, "coarse entries have other biases"
            real &= (bias[0, :, 0] == 0.0).expand_as(real)
        for head in range(len(at)):
            held[first * group + head, at[head][real[head]]] = True
    return held


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("streaming_llm", {}),
        pytest.param("snapkv", {}, marks=pytest.mark.slow),
        pytest.param("h2o", {}, marks=pytest.mark.slow),
        ("quest", {}),
        ("sketch", {"coarse": False, "exact_form": "raw"}),
        pytest.param("shadowkv", {}, marks=pytest.mark.slow),
        pytest.param("clusterkv", {}, marks=pytest.mark.slow),
        ("sekv", {"fill": False}),
        ("heterocache", {"strict": True}),
    ],
)
def test_against_the_entries_that_attention_reads(subject, method, options, monkeypatch):
    compiled, _, ids = subject
    by = compiled.with_method(method, budget=0.6 if method == "clusterkv" else 0.3, config=compiled.settings, **options)
    plan = by.placement.plan
    record = by.prefill_record(ids[:, :TOKENS], surprisal=plan.reads_surprisal, all_queries=plan.reads_queries)
    state = by.compress(record)
    ordered = record.ordered_for(by.program)
    state.watch = MassWatch(ordered)
    keys = {store: ordered.keys[store].float() for store in ordered.keys}
    naive = {}

    def entries(self, site, q, k, v, positions, real=State.entries):
        made = real(self, site, q, k, v, positions)
        place = by.program.sites[site]
        if site == place.store:
            keys[site] = torch.cat([keys[site], k[0].float()], 1)
        every = keys[place.store].repeat_interleave(place.group_size, 0)
        logits = torch.einsum("hd,hnd->hn", q[0, :, 0].float(), every) * place.scale
        weights = logits.softmax(-1)
        far = torch.arange(every.shape[1])
        far = (far >= SINKS) & (far <= int(positions[0, 0]) - WINDOW)
        held = seen_positions(made, place.q_heads, place.group_size, every.shape[1]) & far
        best = torch.stack([w[far].sort(descending=True).values[: int(h.sum())].sum() for w, h in zip(weights, held)])
        told = torch.stack([(weights * held).sum(-1), best, (weights * far).sum(-1)])
        naive[site] = naive.get(site, 0) + told
        return made

    monkeypatch.setattr(State, "entries", entries)
    for place in range(TOKENS, TOKENS + NEW):
        by.extend(state, ids[:, place : place + 1])
    found = state.watch.mass()
    assert found.sites == sorted(naive)
    for index, site in enumerate(found.sites):
        order = by.program.sites[site].head_order
        want = naive[site]
        if order:
            places = [order.index(head) for head in range(len(order))]
            want = want.unflatten(1, (len(order), -1))[:, places].flatten(1)
        mine = torch.tensor([found.caught[index], found.best[index], found.far[index]])
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5)
    assert 0 < found.of_all < 1
    assert found.of_all <= found.share <= 1 + 1e-6


def test_the_full_cache_catches_all(subject):
    compiled, _, ids = subject
    record = compiled.prefill_record(ids[:, :TOKENS])
    state = compiled.compress(record)
    state.watch = MassWatch(record)
    compiled.extend(state, ids[:, TOKENS:])  # several tokens at once
    found = state.watch.mass()
    assert found.of_all == pytest.approx(1.0)
    assert found.share == pytest.approx(1.0)
    assert state.fork().watch is None


def test_a_report_has_tables_and_a_picture(subject, tmp_path):
    compiled, tokenizer, _ = subject
    variants = (Variant(method="full"), *(Variant(method=m, budget=0.2) for m in ("streaming_llm", "shadowkv")))
    asked = Grid(variants=variants, families=("dense",), lengths=(400,), samples=2, mass=True)
    rows, steps = tmp_path / "rows.jsonl", []
    report = evaluate(compiled, tokenizer, asked, identity="x", rows=rows, progress=lambda *told: steps.append(told))
    shares = {c.cell.variant.method: c.mass.of_all for c in report.cells}
    assert shares["full"] == pytest.approx(1.0)
    assert 0 <= shares["streaming_llm"] < shares["shadowkv"] < 1
    assert "Far attention caught (%), 400 tokens" in markdown(report)
    assert mass_heatmap(report, "unseen", 400, 0.2, tmp_path / "mass.png").stat().st_size > 5000
    assert mass_heatmap(report, "seen", 400, 0.2, tmp_path / "none.png") is None
    evaluate(compiled, tokenizer, asked, identity="x", rows=rows, progress=lambda *told: steps.append(told))
    assert len(steps) == 3  # nothing was measured again
