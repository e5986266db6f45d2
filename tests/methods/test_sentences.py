"""Sentences on token ids are those of the text, for every tokenizer, against a naive division of the text."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv import bundled
from semkv.methods.sentences import (
    ABBREVIATIONS,
    MARKERS,
    START,
    bucket_lengths,
    sentence_classes,
    sentence_ends,
    sentence_starts,
    state_behind,
)

TOKENIZERS = Path(__file__).parents[3] / "shared" / "data" / "tokenizers"
NAMES = ("dolma2", "gpt2", "neox", "bundled")
CLOSING = "\"'”’»)]}」』）】》〉"
TEXTS = {
    "decimals": "The value of pi is 3.14. It costs $1,299.99 today. Version 2.0.1 is out.",
    "abbreviations": "Dr. Smith met J. Doe at 10 a.m. today. Mr. Lee left, e.g. by train. The U.S. team won vs. France. Done.",
    "quotes": '"Really?" she asked. He said "no." Then (it rained!) all left. "Why?" Nobody knew.',
    "marks": "Stop!! What?! Well... Go on. Is a!=b or x.y? Yes.",
    "lines": "A title\n\nThe first paragraph. It ends here.\nA line without a stop\nAnother one",
    "cjk": "今天天气很好。我们去公园吧！「好的。」他说？是的。",
    "a mark with its line break": '今天。\n"quoted." 你好！ "again."',
    "mixed": "He said 你好。Then he left. 价格是3.14元。好！",
    "wrapped": "It was the best of times, it was the worst of times, it was the\nage of wisdom, it was the age of foolishness, "
    "as Dr.\nManette said to all of those who were there that night. It\nwas the epoch of belief.\n\nA second paragraph that goes "
    "on for a line or so, and\nthen some.",
    "headings": "II. On the many uses of maps and of those who\nread them\n\nMaps are read by those who walk and those who do not\nwalk.",
    "items": "There are several things that one has to bring along on a walk:\n- a map of the whole country that one is about to see\n"
    "- shoes that were worn before and that are not too small\n12) and whatever else one may want to carry up a hill\nas far as its top",
    "code": "def total_of_all(numbers, start=0, other=None, m=True):\n    for number in numbers:\n        start += number * 2 - 1 + "
    "m + number\n    return start\n\nprint(total_of_all([1, 2, 3]))\nprint(4)",
    "one line each": "word and so on " * 12 + "\n" + "other words that follow " * 12 + "\nthe end of it all",
    "none": "no marks at all only words that go on and on without any end in sight",
}


@cache
def tokenizer_of(name: str):
    if name == "bundled":
        return bundled.load()[1]
    if not (TOKENIZERS / name).is_dir():
        pytest.skip(f"the tokenizer {name} is not here")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TOKENIZERS / name)


@cache
def classes_of(name: str) -> torch.Tensor:
    return sentence_classes(tokenizer_of(name))


def line_lengths(name: str, text: str) -> list[int]:
    """By line break, tokens of the line that it ends, its break's among them."""
    tokenizer = tokenizer_of(name)
    counts, count = [], 0
    for token in tokenizer.encode(text, add_special_tokens=False):
        count += 1
        breaks = tokenizer.decode([token]).count("\n")
        if breaks:
            counts += [count, *[0] * (breaks - 1)]
            count = 0
    return counts


def wrapped(text: str, at: int, tokens: int) -> bool:
    """Whether the line break at `at`, of a line of so many tokens, is one within prose."""
    after = text[at + 1 : at + 2]
    blank = not text[text.rfind("\n", 0, at) + 1 : at].strip()
    return 8 <= tokens <= 40 and not (blank or not after or after.isspace() or after.isdigit() or after in MARKERS)


def sentences_of(text: str, lines: list[int] = ()) -> list[str]:
    """Sentences of a text without the white space around them, character by character. lines: see `line_lengths`."""
    out, begin, at = [], 0, 0
    lengths = iter(lines)
    while at < len(text):
        end = at + 1
        if text[at] == "\n":
            ends = not wrapped(text, at, next(lengths))
        elif text[at] in "。！？":
            while end < len(text) and text[end] in CLOSING + "。！？":
                end += 1
            ends = True
        elif text[at] in ".!?…":
            while end < len(text) and text[end] in ".!?…":
                end += 1
            marks = text[at:end]
            while end < len(text) and text[end] in CLOSING:
                end += 1
            word = re.search(r"[\w.]*$", text[begin:at])[0].lstrip(".")
            short = word.lower() in ABBREVIATIONS or re.search(r"(^|\.)[A-Za-z]$", word) is not None
            ends = (end == len(text) or text[end].isspace()) and not (marks == "." and short)
        else:
            ends = False
        if ends:
            out.append(text[begin:end].strip())
            begin = end
        at = end
    return [one for one in [*out, text[begin:].strip()] if one]


def token_sentences(name: str, text: str) -> list[str]:
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    ends = sentence_ends(ids, classes_of(name)).tolist()
    out, run = [], []
    for token, end in zip(ids, ends):
        run.append(token)
        if end:
            out.append(tokenizer.decode(run, clean_up_tokenization_spaces=False).strip())
            run = []
    assert not run
    return out


@pytest.mark.parametrize("name", NAMES[:3])
@pytest.mark.parametrize("kind", list(TEXTS))
def test_as_the_text_has_them(name, kind):
    assert token_sentences(name, TEXTS[kind]) == sentences_of(TEXTS[kind], line_lengths(name, TEXTS[kind]))


PIECES = (
    "word",
    "A",
    "3.14",
    "$1,299.99",
    "2.0.1",
    "Dr.",
    "Mr.",
    "J.",
    "e.g.",
    "U.S.",
    "a.m.",
    "vs.",
    "end.",
    "end!",
    "end?",
    "what?!",
    "well...",
    '"quoted."',
    '"Why?"',
    "(aside.)",
    "“He left.”",
    "‘Go.’",
    "a!=b",
    "x.y",
    "no marks",
    "今天。",
    "「好。」",
    "去吧！",
    "是的？",
    "你好",
)


@pytest.mark.parametrize("name", NAMES[:3])
@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(PIECES), st.sampled_from((" ", " ", " ", "\n", "\n\n"))), min_size=1, max_size=24
    )
)
def test_any_run_of_pieces_is_divided_as_the_text_is(name, parts):
    text = "".join(piece + space for piece, space in parts).strip()
    assert token_sentences(name, text) == sentences_of(text, line_lengths(name, text))


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.sampled_from(("the", "readers", ".", "?", ",", "copied", "maps", "71")), min_size=1, max_size=30)
)
def test_any_run_of_bundled_words_is_divided_as_the_text_is(parts):
    text = " ".join(parts)
    assert token_sentences("bundled", text) == sentences_of(text)


def test_the_bundled_tokenizer():
    from semkv.profiles.bundled.tasks import FAMILIES, make_haystack, make_text

    for text in (make_text(300, 1), make_haystack(FAMILIES[0], 300, 2, n_questions=1).context):
        assert token_sentences("bundled", text) == sentences_of(text)
        assert len(sentences_of(text)) > 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is 3.14. So.", ["It is 3.14.", "So."]),
        ("Mr. Lee (a.k.a. Lee) ran.", ["Mr. Lee (a.k.a. Lee) ran."]),
        ('"Go!" he said.', ['"Go!"', "he said."]),
        ("好。好！", ["好。", "好！"]),
        ("A line of a book that is as wide as\nthe others.", ["A line of a book that is as wide as\nthe others."]),
        ("A heading\nAnd a text.", ["A heading", "And a text."]),
    ],
)
def test_by_hand(text, expected):
    assert sentences_of(text, line_lengths("gpt2", text)) == expected
    assert token_sentences("gpt2", text) == expected


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_table_of_a_byte_per_token(name):
    classes = classes_of(name)
    assert classes.dtype == torch.uint8
    assert len(classes) == len(tokenizer_of(name))
    special = tokenizer_of(name).all_special_ids
    ids = [*tokenizer_of(name).encode("one two", add_special_tokens=False), special[0]]
    assert sentence_starts([*ids, ids[0]], classes)[0].tolist() == [True, *[False] * (len(ids) - 2), False, True]


@pytest.mark.parametrize("cut", range(1, 30, 4))
def test_token_by_token_is_all_at_once(cut):
    ids = tokenizer_of("gpt2").encode(TEXTS["wrapped"] + TEXTS["cjk"], add_special_tokens=False)
    whole, _ = sentence_starts(ids, classes_of("gpt2"))
    first, state = sentence_starts(ids[:cut], classes_of("gpt2"))
    second, _ = sentence_starts(ids[cut:], classes_of("gpt2"), state)
    assert torch.equal(torch.cat([first, second]), whole)
    assert state != START


@pytest.mark.parametrize(
    "text", ["abbreviations", "quotes", "cjk", "blank", "wrapped", "items", "one line each", "breaks"]
)
@pytest.mark.parametrize("name", ["gpt2", "bundled"])
def test_the_state_is_read_from_the_last_words(name, text):
    """Also behind runs of blanks and closing marks of any length."""
    texts = {**TEXTS, "blank": "He left." + " \t" * 20 + '"' * 12 + ")" * 9 + " And so e" + "." * 3 + " Mr" + " " * 15}
    texts["breaks"] = (
        ("so it went on and on for a whole line\n" + " " * 5 + ")" * 3) * 3 + "and\n\n\nso\n" + ") " * 50 + "\n"
    )
    classes = classes_of(name)
    ids = tokenizer_of(name).encode(texts[text], add_special_tokens=False)
    for count in range(len(ids) + 1):
        assert state_behind(ids[:count], classes) == sentence_starts(ids[:count], classes)[1]


CORPUS = Path(__file__).parents[3] / "shared" / "data" / "corpus"


def of_corpus(name: str, start: int) -> str:
    if not (CORPUS / f"{name}.txt").is_file():
        pytest.skip("the texts are not here")
    text = (CORPUS / f"{name}.txt").read_text(encoding="utf-8")[start : start + 20_000]
    return text[text.index("\n\n") :].strip()


@pytest.mark.parametrize("name", ["dolma2", "gpt2"])
@pytest.mark.parametrize("book", ["moby_dick", "pride_and_prejudice"])
def test_a_wrapped_book_has_the_sentences_of_the_book(name, book):
    """Hard-wrapped at 72 columns, as plain-text editions are, nearly all sentences are those of paragraphs that are one line each; a
    sentence at every line break would leave a third of them at most."""
    paragraphs = of_corpus(book, 60_000).split("\n\n")
    wrapped = "\n\n".join(textwrap.fill(one, 72) for one in paragraphs)
    found, whole = token_sentences(name, wrapped), token_sentences(name, "\n\n".join(paragraphs))
    assert found == sentences_of(wrapped, line_lengths(name, wrapped))
    shared = Counter(" ".join(one.split()) for one in found) & Counter(" ".join(one.split()) for one in whole)
    assert shared.total() > 0.93 * len(whole)
    assert len(found) < 1.1 * len(whole)


def test_items_and_lines_of_code_stand_alone():
    text = of_corpus("python_peps_public_domain", 0)
    found = token_sentences("gpt2", text)
    assert found == sentences_of(text, line_lengths("gpt2", text))
    for line in ("if x == 4: print(x, y); x, y = y, x", "ham[lower:upper], ham[lower:upper:], ham[lower::step]"):
        assert line in found
    items = [line.strip() for line in text.splitlines() if line.lstrip().startswith("- ")]
    assert sum(one.startswith("- ") for one in found) == len(items) > 10


def test_long_buckets_are_split_evenly():
    starts = torch.zeros(30, dtype=torch.bool)
    starts[[0, 4, 21]] = True
    assert bucket_lengths(starts, 8).tolist() == [4, 6, 6, 5, 5, 4]
    assert bucket_lengths(torch.zeros(10, dtype=torch.bool), 4).tolist() == [4, 3, 3]
    assert bucket_lengths(torch.zeros(0, dtype=torch.bool), 4).tolist() in ([], [0])
