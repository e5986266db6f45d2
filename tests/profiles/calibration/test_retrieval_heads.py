"""Retrieval scores against loops over the full attention of a generated sequence."""

import dataclasses

import pytest
import torch

from semkv.profiles.calibration.generation import CachedReader
from semkv.profiles.calibration.measure import Sums
from semkv.profiles.calibration.needles import NeedleQuestion, NeedleTest
from semkv.profiles.calibration.retrieval_heads import SemanticRetrieval, generate, recall


def with_tests(subject, tests):
    return dataclasses.replace(subject, data=dataclasses.replace(subject.data, needles=tuple(tests)))


def greedy(model, ids, count):
    for _ in range(count):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids[None], use_cache=False).logits[0, -1:].argmax(-1)])
    return ids


def naive_scores(layer, ids, start, count, evidence, k):
    """Eq. 5 and the classic scores of one layer's attention [Hq, T, T]; step t is the query that makes token start + t."""
    heads = layer.shape[0]
    semantic, classic, classic_k = [0.0] * heads, [0.0] * heads, [0.0] * heads
    tokens = {int(ids[place]) for place in evidence}
    for step in range(count):
        made = int(ids[start + step])
        if made not in tokens:
            continue
        for head in range(heads):
            row = layer[head, start + step - 1, : start + step]
            semantic[head] += float(sum(row[place] for place in evidence)) / count
            ranked = row.argsort(descending=True, stable=True).tolist()
            hits = [place in evidence and int(ids[place]) == made for place in ranked[:k]]
            classic[head] += hits[0] / count
            classic_k[head] += any(hits) / count
    return semantic, classic, classic_k


def test_scores_are_the_means_of_the_naive_ones(subject, model, dense_weights, measure_settings):
    step, sums = SemanticRetrieval(subject), Sums()
    for unit in range(step.units):
        step.measure(unit, sums)
    section = step.finish(sums).section
    assert section.tests == 12
    assert 0 < section.passed <= 12
    totals, passed = {}, 0
    for test in subject.data.needles:
        for question in test.questions:
            count = len(question.answer)
            ids = greedy(model, torch.cat([test.context, torch.tensor(question.ids)]), count)
            if recall(ids[-count:].tolist(), question.answer) <= measure_settings.pass_recall:
                continue
            passed += 1
            for site, layer in enumerate(dense_weights(model, ids)):
                made = naive_scores(
                    layer, ids, len(ids) - count, count, set(question.evidence), measure_settings.classic_top_k
                )
                totals[site] = totals.get(site, 0) + torch.tensor(made)
    assert section.passed == passed
    assert sum(map(sum, section.semantic)) > 0
    for site, total in totals.items():
        for row, kind in zip(total / passed, ("semantic", "classic", "classic_top_k")):
            assert getattr(section, kind)[site] == pytest.approx(row.tolist(), abs=1e-4)


def test_generation_is_that_of_the_model_and_leaves_the_context(program, model, measure_data):
    test = measure_data.needles[0]
    reader = CachedReader(program, len(test.context) + 16)
    reader.read(test.context)
    expected = greedy(model, torch.cat([test.context, torch.tensor(test.questions[0].ids)]), 5)[-5:].tolist()
    for _ in range(2):
        reader.rewind(len(test.context))
        assert [step.token for step in generate(reader, test.questions[0], 3)] == expected
    with pytest.raises(ValueError, match=r"tokens do not fit into a cache of"):
        reader.read(test.context)


def test_recall_counts_each_token_as_often_as_it_was_made():
    assert recall([1, 1, 2], [1, 2, 3, 1]) == pytest.approx(0.75)
    assert recall([1, 1, 1], [1, 2]) == pytest.approx(0.5)
    assert recall([], [1]) == 0.0


def test_a_model_that_passes_no_test_has_no_section(subject, measure_settings):
    strict = subject.settings.model_copy(update={"pass_recall": 0.99})
    step, sums = SemanticRetrieval(dataclasses.replace(subject, settings=strict)), Sums()
    step.measure(0, sums)
    outcome = step.finish(sums)
    assert outcome.section is None
    assert "none of 2 needle tests passed (mean recall" in outcome.note
    assert "a model that answers from its context" in outcome.note


def test_no_test_at_all_is_said(subject):
    step = SemanticRetrieval(with_tests(subject, []))
    assert step.finish(Sums()).note == "no needle test fits the context: pass a larger --length"


def test_steps_that_make_no_token_of_the_span_count_nothing(subject, model):
    context = torch.zeros(96, dtype=torch.int64)
    question = NeedleQuestion((1, 2, 3), (0, 0), (10, 11))
    made = greedy(model, torch.cat([context, torch.tensor([1, 2, 3])]), 2)[-2:].tolist()
    step, sums = SemanticRetrieval(with_tests(subject, [NeedleTest(context, (question,))])), Sums()
    step.measure(0, sums)
    if 0 not in made:
        assert float(sums["passed"]) == 0
    else:
        assert float(sums["semantic.0"].sum()) > 0
