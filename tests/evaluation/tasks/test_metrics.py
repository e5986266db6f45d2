"""Scores against worked examples, naive forms and the properties that their definitions promise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semkv.errors import ConfigError
from semkv.evaluation.tasks import metrics
from semkv.evaluation.tasks.rouge import rouge_l

TEXT = st.text(alphabet="ab c.AB", max_size=30)


def test_containment_ignores_case():
    assert metrics.share_contained("x ALPHA y", ("alpha", "beta")) == 0.5
    assert metrics.any_contained("x ALPHA y", ("beta", "Alpha")) == 1.0
    assert metrics.any_contained("", ("beta",)) == 0.0


def test_words_are_normalised_as_squads():
    assert metrics.plain_words("The U.S.  (an) Army's a-b!") == ["us", "armys", "ab"]


def test_f1_counts_repeats():
    assert metrics.question_f1("the cat cat", "cat cat dog") == pytest.approx(2 * 1.0 * (2 / 3) / (1 + 2 / 3))
    assert metrics.question_f1("", "cat") == 0.0


def test_chinese_words_lose_punctuation(monkeypatch):
    monkeypatch.setattr(metrics, "chinese_words", lambda text: list(text))
    assert metrics.chinese_plain_words("\u4f60\uff0c\u597d\u3002 A") == ["\u4f60", "\u597d", "a"]


def test_chinese_without_its_package_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ConfigError, match="divides them with the package jieba: `pip install jieba`"):
        metrics.chinese_words("\u4f60")


def test_a_class_within_the_right_ones_name_does_not_count():
    choices = ("Entity", "Other entity", "City")
    assert metrics.classification("Other entity", "Other entity", ("entity", *choices)) == 1.0
    assert metrics.classification("City or Other entity", "Other entity", choices) == 0.5
    assert metrics.classification("City", "Other entity", choices) == 0.0


def test_counts_and_paragraphs():
    assert metrics.number_share("3 of 3, not 4", "3") == pytest.approx(2 / 3)
    assert metrics.number_share("none", "3") == 0.0
    assert metrics.paragraph_number("Paragraph 12", "Paragraph") == "12"
    with pytest.raises(ConfigError, match="reference 'Part 2': expected 'Paragraph' and a number"):
        metrics.paragraph_number("Part 2", "Paragraph")


def test_code_is_compared_by_its_first_line():
    assert metrics.code_similarity("# note\nreturn a", "return a") == 1.0
    assert metrics.code_similarity("return b", "return a") == 0.88
    assert metrics.code_similarity("", "return a") == 0.0


@pytest.mark.parametrize(
    ("wanted", "written", "score"),
    [
        (100, 100, 1.0),
        (100, 400, 0.0),
        (100, 250, 0.5),
        (100, 50, 0.5),
        (300, 100, 0.0),
        (100, 0, 0.0),
        (100, 900, 0.0),
    ],
)
def test_length_scores(wanted, written, score):
    assert metrics.length_score(wanted, written) == pytest.approx(score)


def test_written_words_count_letters_words_and_chinese_characters():
    assert metrics.written_words("Two words, 3 and \u4f60\u597d") == 5


def test_rouge_of_lins_example():
    # Section 3.3: the reference w1..w5, a candidate of two sentences; the union of the subsequences is w1 w2 w3 w5.
    recall, precision = 4 / 5, 4 / 8
    expected = 2 * recall * precision / (recall + precision + 1e-8)
    assert rouge_l("w1 w2 w6 w7 w8.w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5") == pytest.approx(expected)
    assert rouge_l("", "a") == 0.0
    assert rouge_l("...", "a") == 0.0


@given(TEXT, TEXT)
def test_scores_stay_in_their_range(first, second):
    for score in (metrics.question_f1(first, second), rouge_l(first, second), metrics.code_similarity(first, second)):
        assert 0.0 <= score <= 1.0


@given(TEXT)
def test_a_text_is_its_own_best_summary(text):
    if text.strip(". "):
        assert rouge_l(text, text) == pytest.approx(1.0, abs=1e-6)
