"""The task families: deterministic, of the asked length, with evidence that holds the answer."""

import random

import pytest

from semkv.profiles.bundled.tasks import FAMILIES, Facts, confusable_keys, make_haystack, make_text, vocabulary


def words(text):
    return len(text.split())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n_tokens", [111, 512, 2048])
def test_length_is_at_most_and_close_to_the_asked_one(family, n_tokens):
    for seed in range(5):
        length = words(make_haystack(family, n_tokens, seed).context)
        assert n_tokens - 24 <= length <= n_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_in_the_seed(family):
    assert make_haystack(family, 300, 5) == make_haystack(family, 300, 5)
    assert make_haystack(family, 300, 5) != make_haystack(family, 300, 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_evidence_is_whole_sentences_that_hold_the_answer(family):
    for seed in range(20):
        haystack = make_haystack(family, 600, seed, n_questions=3)
        assert len(haystack.questions) == 3
        for question in haystack.questions:
            sentences = [haystack.context[a:b] for a, b in question.evidence]
            assert all(s.endswith(".") and s.count(".") == 1 for s in sentences)
            told = " ".join(sentences).split()
            assert all(word in told for word in question.answer.split() if word != "reaches")
            assert question.text.startswith(" ")
            assert question.family == family
            assert question.depth == pytest.approx(min(a for a, _ in question.evidence) / len(haystack.context))


def test_multi_has_both_forms_with_fixed_answer_lengths():
    counts = {
        len(q.evidence): len(q.answer.split())
        for seed in range(20)
        for q in make_haystack("multi", 400, seed).questions
    }
    assert counts == {2: 5, 3: 5}


def test_dense_holds_about_a_hundred_pairs_in_1200_tokens():
    for seed in range(5):
        context = make_haystack("dense", 1200, seed).context
        assert 95 <= context.count(" .") <= 115
        assert context.count("code") == context.count(" .")


def test_confusable_has_keys_that_share_words_and_the_swapped_key():
    facts = Facts(random.Random(0))
    key = facts.key()
    keys = confusable_keys(facts, key, 8)
    assert keys[0] == key[::-1]
    assert len(set(keys)) == 8
    assert key not in keys
    assert all(set(other) & set(key) for other in keys)
    assert make_haystack("confusable", 1024, 0).context.count("code") >= 20


@pytest.mark.parametrize("family", ["single", "confusable", "dense"])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_depth_is_honoured(family, depth):
    question = make_haystack(family, 2048, 1, depth=depth).questions[0]
    assert question.depth == pytest.approx(depth, abs=0.03)


def test_counts_with_the_callers_tokenizer():
    context = make_haystack("single", 900, 0, count_tokens=len).context
    assert 600 < len(context) <= 900


def test_unknown_family_and_too_small_a_context_are_refused():
    with pytest.raises(ValueError, match="'riddle'"):
        make_haystack("riddle", 512, 0)
    with pytest.raises(ValueError, match="20 tokens are too few"):
        make_haystack("confusable", 20, 0)
    with pytest.raises(ValueError, match="fewer than the 50 questions"):
        make_haystack("dense", 100, 0, n_questions=50)


def test_text_for_calibration():
    plain, tasks = make_text(500, 0), make_text(500, 0, with_tasks=True)
    assert plain == make_text(500, 0)
    assert " code " not in plain
    assert " code " in tasks
    assert 470 <= words(plain) <= 500
    assert 470 <= words(tasks) <= 500


def test_vocabulary_covers_everything():
    known = set(vocabulary())
    assert 500 <= len(known) <= 1000
    for family in FAMILIES:
        for seed in range(10):
            haystack = make_haystack(family, 512, seed)
            text = haystack.context + "".join(f"{q.text} {q.answer}" for q in haystack.questions)
            assert set(text.split()) <= known
