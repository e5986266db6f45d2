"""Sentences on token ids are those of the text, for every tokenizer, against a naive division of the text."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv import bundled
from semkv.methods.sentences import (
    ABBREVIATIONS,
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
    "mixed": "He said 你好。Then he left. 价格是3.14元。好！",
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


def sentences_of(text: str) -> list[str]:
    """Sentences of a text without the white space around them, character by character."""
    out, begin, at = [], 0, 0
    while at < len(text):
        end = at + 1
        if text[at] == "\n":
            ends = True
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
    assert token_sentences(name, TEXTS[kind]) == sentences_of(TEXTS[kind])


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
        st.tuples(st.sampled_from(PIECES), st.sampled_from((" ", " ", "\n", "\n\n"))), min_size=1, max_size=12
    )
)
def test_any_run_of_pieces_is_divided_as_the_text_is(name, parts):
    text = "".join(piece + space for piece, space in parts).strip()
    assert token_sentences(name, text) == sentences_of(text)


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
    ],
)
def test_by_hand(text, expected):
    assert sentences_of(text) == expected
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
    ids = tokenizer_of("gpt2").encode(TEXTS["abbreviations"] + TEXTS["cjk"], add_special_tokens=False)
    whole, _ = sentence_starts(ids, classes_of("gpt2"))
    first, state = sentence_starts(ids[:cut], classes_of("gpt2"))
    second, _ = sentence_starts(ids[cut:], classes_of("gpt2"), state)
    assert torch.equal(torch.cat([first, second]), whole)
    assert state != START


@pytest.mark.parametrize("text", ["abbreviations", "quotes", "cjk", "blank"])
@pytest.mark.parametrize("name", ["gpt2", "bundled"])
def test_the_state_is_read_from_the_last_words(name, text):
    """Also behind runs of blanks and closing marks of any length."""
    texts = {**TEXTS, "blank": "He left." + " \t" * 20 + '"' * 12 + ")" * 9 + " And so e" + "." * 3 + " Mr" + " " * 15}
    classes = classes_of(name)
    ids = tokenizer_of(name).encode(texts[text], add_special_tokens=False)
    for count in range(len(ids) + 1):
        assert state_behind(ids[:count], classes) == sentence_starts(ids[:count], classes)[1]


def test_long_buckets_are_split_evenly():
    starts = torch.zeros(30, dtype=torch.bool)
    starts[[0, 4, 21]] = True
    assert bucket_lengths(starts, 8).tolist() == [4, 6, 6, 5, 5, 4]
    assert bucket_lengths(torch.zeros(10, dtype=torch.bool), 4).tolist() == [4, 3, 3]
    assert bucket_lengths(torch.zeros(0, dtype=torch.bool), 4).tolist() in ([], [0])
