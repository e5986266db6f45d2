"""Scores of a text against references, each in [0, 1], written from the definitions that the benchmarks publish."""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from semkv.errors import ConfigError

ARTICLES = re.compile(r"\b(a|an|the)\b")
CHINESE = re.compile(r"[\u4e00-\u9fff]")
CHINESE_PUNCTUATION = (
    "\uff01\uff1f\uff61\u3002\uff02\uff03\uff04\uff05\uff06\uff07\uff08\uff09\uff0a\uff0b\uff0c\uff0d\uff0f\uff1a"
    "\uff1b\uff1c\uff1d\uff1e\uff20\uff3b\uff3c\uff3d\uff3e\uff3f\uff40\uff5b\uff5c\uff5d\uff5e\uff5f\uff60\uff62"
    "\uff63\uff64\u3001\u3003\u300b\u300c\u300d\u300e\u300f\u3010\u3011\u3014\u3015\u3016\u3017\u3018\u3019\u301a"
    "\u301b\u301c\u301d\u301e\u301f\u3030\u303e\u303f\u2013\u2014\u2018\u2019\u201b\u201c\u201d\u201e\u201f\u2026"
    "\u2027\ufe4f"
)
PUNCTUATION = frozenset(string.punctuation)
ALL_PUNCTUATION = PUNCTUATION | frozenset(CHINESE_PUNCTUATION)

Words = Callable[[str], list[str]]


def share_contained(prediction: str, references: Sequence[str]) -> float:
    """Share of references that stand in the text, case apart: RULER's `string_match_all`."""
    text = prediction.lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def any_contained(prediction: str, references: Sequence[str]) -> float:
    """Whether one of the references stands in the text, case apart: RULER's `string_match_part`."""
    text = prediction.lower()
    return float(any(reference.lower() in text for reference in references))


def first_number(prediction: str) -> str:
    """The first run of digits; empty where there is none (InfiniteBench's pass-key and number scoring)."""
    found = re.search(r"[0-9]+", prediction)
    return found[0] if found else ""


def plain_words(text: str) -> list[str]:
    """Words in small letters, without ASCII punctuation and articles: SQuAD's normalisation."""
    bare = "".join(ch for ch in text.lower() if ch not in PUNCTUATION)
    return ARTICLES.sub(" ", bare).split()


def chinese_words(text: str) -> list[str]:
    """Words of Chinese text as `jieba` divides it, with their spaces. Raises ConfigError without that package."""
    try:
        import jieba
    except ImportError as error:
        raise ConfigError(
            "LongBench scores Chinese by words and divides them with the package jieba: `pip install jieba`"
        ) from error
    return list(jieba.cut(text, cut_all=False))


def chinese_plain_words(text: str) -> list[str]:
    """Chinese words in small letters, without punctuation and spaces."""
    bare = ("".join(ch for ch in word.lower() if ch not in ALL_PUNCTUATION) for word in chinese_words(text))
    return [word for word in ("".join(part.split()) for part in bare) if word]


def f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of words, counted with their multiplicity."""
    shared = sum((Counter(prediction) & Counter(reference)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def question_f1(prediction: str, reference: str, words: Words = plain_words) -> float:
    """F1 of an answer's words."""
    return f1(words(prediction), words(reference))


def number_share(prediction: str, wanted: str) -> float:
    """Share of the numbers in a text that are the wanted one: LongBench's counting and retrieval score."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def paragraph_number(reference: str, word: str) -> str:
    """The number in `Paragraph 12`. Raises ConfigError where the reference has another form."""
    found = re.search(rf"{word}\s?(\d+)", reference)
    if found is None:
        raise ConfigError(f"reference {reference!r}: expected {word!r} and a number")
    return found[1]


def classification(prediction: str, reference: str, choices: Sequence[str]) -> float:
    """One over the number of classes that the text names, where the right one is among them; else 0.

    A class whose name is part of the right one's is named by naming that, and does not count (LongBench).
    """
    named = [name for name in choices if name in prediction and not (name in reference and name != reference)]
    return 1.0 / len(named) if reference in named else 0.0


def code_similarity(prediction: str, reference: str) -> float:
    """Edit similarity of the first line that is code with the right next line, in whole percents (LongBench).

    Ratio of matching characters by `difflib`, which is what LongBench's own dependencies compute.
    """
    lines = prediction.lstrip("\n").split("\n")
    first = next((line for line in lines if "`" not in line and "#" not in line and "//" not in line), "")
    if not first or not reference:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, first, reference).ratio()) / 100


def length_score(wanted: int, written: int) -> float:
    """How well a text keeps its required length (LongWriter, Bai et al. 2024, equation 1).

    Falls to 0 at four times the length, or at a third of it.
    """
    if written <= 0:
        return 0.0
    if written > wanted:
        return max(0.0, 1.0 - (written / wanted - 1.0) / 3.0)
    return max(0.0, 1.0 - (wanted / written - 1.0) / 2.0)


def written_words(text: str) -> int:
    """Length of a text as LongWriter counts it: Chinese characters, and words of Latin letters."""
    return len(CHINESE.findall(text)) + len(re.findall(r"\b[a-zA-Z]+\b", text))
