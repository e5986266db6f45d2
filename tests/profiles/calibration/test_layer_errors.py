"""Layer errors against a naive pass: the model's own keys, values and output projections, one step at a time."""

import dataclasses

import pytest
import torch

from semkv.ir.site import AttentionSite
from semkv.methods.compresskv import HeadVotes
from semkv.profiles.calibration.interpreter import full_attention
from semkv.profiles.calibration.layer_errors import CompressionErrors, normalised, relative_errors, select_tokens
from semkv.profiles.calibration.measure import Sums
from semkv.profiles.schema import Profile, ProfileInfo, RetrievalHeads
from semkv.runtime.prompt.record import RowRecord


def naive_selection(layer, context, keep, window, pool, heads):
    """CompressKV's choice in loops: votes summed over the window's queries, pooled, averaged over heads; and the window itself."""
    votes = [
        sum(float(layer[h, q, j]) for h in heads for q in range(context - window, context))
        for j in range(context - window)
    ]
    half = pool // 2
    padded = [0.0] * half + votes + [0.0] * half
    means = [sum(padded[j : j + pool]) for j in range(context - window)]
    best = sorted(range(context - window), key=lambda j: -means[j])[: keep - window]
    return sorted(best) + list(range(context - window, context))


def naive_errors(model, program, layers, ids, context, settings, selectors):
    """Eq. 6-8 per layer: softmax over the kept tokens alone, times the model's W_O."""
    calls = {}

    def collect(call):
        calls[call.site] = call
        return full_attention(call)

    from semkv.profiles.calibration.interpreter import run_body

    with torch.no_grad():
        run_body(program.body, ids, torch.arange(len(ids)), collect)
    errors = []
    for site, layer in enumerate(layers):
        call, weight = calls[site], model.model.layers[site].self_attn.o_proj.weight
        kept = naive_selection(
            layer, context, settings.keep, settings.observation, settings.pool, selectors(site, layer.shape[0])
        )
        total = 0.0
        for t in range(context, len(ids)):
            outputs = []
            for places in (range(t + 1), [*kept, *range(context, t + 1)]):
                heads = []
                for head in range(4):
                    k, v = call.k[head // 2, list(places)], call.v[head // 2, list(places)]
                    share = torch.softmax(k @ call.q[head, t] * call.scale, 0)
                    heads.append(share @ v)
                outputs.append(weight.detach() @ torch.cat(heads))
            full, compressed = outputs
            total += float((compressed - full).norm() / (full.norm() + settings.epsilon))
        errors.append(total)
    return errors


def known_heads(subject, rows):
    site = subject.program.sites[0]
    from semkv.profiles.calibration.calibrate import model_facts

    heads = RetrievalHeads(semantic=rows, classic=rows, classic_top_k=rows, tests=1, passed=1)
    assert site.q_heads == 4
    info = ProfileInfo(fingerprint="f" * 64, model=model_facts(subject.program, "tiny"), retrieval_heads=heads)
    return dataclasses.replace(subject, profile=Profile(info))


@pytest.mark.parametrize("known", [False, True])
def test_errors_are_the_naive_ones(subject, model, dense_weights, measure_settings, known):
    if known:
        subject = known_heads(subject, ((0.1, 0.9, 0.3, 0.0), (0.2, 0.2, 0.1, 0.1)))
    step, sums = CompressionErrors(subject), Sums()
    assert step.selectors(0, 4) == ([1, 2] if known else [0, 1, 2, 3])
    for unit in range(step.units):
        step.measure(unit, sums)
    outcome = step.finish(sums)
    rows = {}
    for name, ids in subject.data.held_out:
        rows[name] = naive_errors(
            model,
            subject.program,
            dense_weights(model, ids),
            ids,
            measure_settings.length,
            measure_settings,
            step.selectors,
        )
    relative = torch.tensor(list(rows.values())).mean(0) / measure_settings.steps
    assert outcome.section.relative == pytest.approx(relative.tolist(), rel=1e-3)
    shares = torch.stack([torch.tensor(row) / sum(row) for row in rows.values()])
    assert outcome.section.errors == pytest.approx((shares.mean(0) / shares.mean(0).sum()).tolist(), rel=1e-3)
    assert sum(outcome.section.errors) == pytest.approx(1, abs=1e-6)
    assert ("best retrieval heads" in outcome.note) == known
    assert "measured after the output projection" in outcome.note


def test_keeping_all_but_nothing_lost_is_no_error(subject, measure_settings):
    whole = subject.settings.model_copy(update={"keep": measure_settings.length})
    step, sums = CompressionErrors(dataclasses.replace(subject, settings=whole)), Sums()
    for unit in range(step.units):
        step.measure(unit, sums)
    section = step.finish(sums).section
    assert max(section.relative) < 1e-4


def test_stores_that_are_not_compressed_have_no_error(subject):
    sites = subject.program.sites
    windowed = (dataclasses.replace(sites[0], treatment="window"), sites[1])
    step, sums = CompressionErrors(dataclasses.replace(subject, program=subject.program.evolve(sites=windowed))), Sums()
    for unit in range(step.units):
        step.measure(unit, sums)
    assert step.finish(sums).section.errors == (0.0, 1.0)


def test_a_data_set_counts_once_whatever_its_scale():
    shares, errors = normalised({"large": [30.0, 10.0], "small": [0.01, 0.03], "none": [0.0, 0.0]})
    assert shares == {"large": [0.75, 0.25], "small": [0.25, 0.75], "none": [0.5, 0.5]}
    assert errors == pytest.approx([0.5, 0.5])


def test_the_window_stays_and_votes_do_not_reach_into_it():
    weights = torch.zeros(1, 2, 12)
    weights[0, :, 3] = 0.5
    weights[0, :, 10:] = 0.25
    assert select_tokens(weights, 5, 1, [0]).tolist()[-2:] == [10, 11]
    assert 3 in select_tokens(weights, 5, 1, [0]).tolist()
    near = torch.zeros(1, 2, 12)
    near[0, :, 4], near[0, :, 10] = (
        0.1,
        0.4,
    )  # pooled before it is cut, the window's own weight would lift its neighbours
    assert select_tokens(near, 5, 3, [0]).tolist() == [3, 4, 5, 10, 11]


@pytest.mark.parametrize(("n", "keep", "window", "pool"), [(63, 32, 8, 5), (40, 13, 5, 7), (111, 17, 1, 3)])
def test_the_method_keeps_what_calibration_measured(n, keep, window, pool):
    """One choice, by the run time's keeper and by calibration's, from the same queries and keys."""
    site = AttentionSite(index=0, name="", store=0, q_heads=6, kv_heads=2, key_dim=8, value_dim=8, scale=0.35)
    generator = torch.Generator().manual_seed(n)
    q, k = torch.randn(6, window, 8, generator=generator), torch.randn(2, n, 8, generator=generator)
    record = RowRecord(ids=torch.zeros(n, dtype=torch.int64), keys={0: k}, queries={0: q})
    kept, recent = HeadVotes(window, pool, "mean", 0, {0: (1, 4)}).keep(site, record, keep, 1)
    logits = torch.einsum("hwd,hnd->hwn", q, k.repeat_interleave(3, 0)) * 0.35
    later = torch.arange(n) > torch.arange(n - window, n)[:, None]
    weights = logits.masked_fill(later, float("-inf")).softmax(-1)
    assert recent == n - window
    assert select_tokens(weights, keep, pool, [1, 4]).tolist() == [*kept[0].tolist(), *range(recent, n)]
    assert relative_errors(torch.tensor([4.0]), torch.tensor([0.0]), 1e-6).item() == pytest.approx(2e6)
