"""Where sentences begin, decided on token ids: a class of one byte per token of a vocabulary, and a small state machine.

A class says how a token begins and how it ends. Rules, as in text: a full stop ends a sentence where white space follows it
("3.14" and "a.b" go on), unless it ends an abbreviation or a lone letter ("Dr.", "e.g.", "J."); exclamation and question
marks where white space follows; CJK marks always. Closing quotes and brackets, more marks and white space
that follow belong to the sentence that they end. What lies inside of one token is not divided.

A line break ends a sentence unless the line is one of wrapped prose: it ends one where another follows (a blank line), where the line has
fewer than `WRAPPED[0]` tokens (headings, lists, code, verse) or more than `WRAPPED[1]` (a paragraph in one line), and where the next line
begins with white space (an indentation) or like an item (`MARKERS`, a digit).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

STOPS, BANGS, WIDE = ".", "!?…", "。！？｡"
MARKERS = "-*+•#>|"
"""Characters with which items of lists, headings, quotations and rows of tables begin."""
WRAPPED = (8, 40)
"""Tokens of a line, its break included, that may be one of wrapped prose."""
CLOSING = "\"'”’»)]}」』）】》〉"
"""Characters that may stand between a mark and the white space behind it."""

ABBREVIATIONS = frozenset(
    (
        "mr",
        "mrs",
        "ms",
        "dr",
        "prof",
        "st",
        "sr",
        "jr",
        "rev",
        "hon",
        "gen",
        "col",
        "sgt",
        "capt",
        "lt",
        "cpt",
        "gov",
        "sen",
        "rep",
        "vs",
        "fig",
        "figs",
        "eq",
        "eqs",
        "sec",
        "vol",
        "pp",
        "ed",
        "eds",
        "approx",
        "dept",
        "est",
        "cf",
        "viz",
        "nos",
        "messrs",
        "mme",
        "mlle",
        "jan",
        "feb",
        "apr",
        "aug",
        "sept",
        "oct",
        "nov",
        "dec",
        "e.g",
        "i.e",
        "a.m",
        "p.m",
        "u.s",
        "u.k",
        "ph.d",
    )
)

# How a token begins.
PLAIN, SPACE, BLANK, CLOSER, STOP, BANG, WIDE_MARK, SPECIAL, BYTE_80, BYTE_BC, BYTE_82, BYTE_81, BYTE_9F, ITEM = range(
    14
)
# How a token ends. The same numbers, + 16 times the tokens of the line so far (as far as they matter), are the states of the machine
# between tokens. BROKEN: one line break, behind which the sentence may go on.
START, WORD, OTHER, SOFT, HARD, FULL, ENDED, SHORT, SHORT_IF_BARE, DOTTED, E3, EF, E3_80, EF_BC, BROKEN = range(15)

PENDING = (SOFT, HARD)
ALONE = (PLAIN, SPACE, ITEM)
"""Beginnings of tokens behind which, unless they end in `SHORT_IF_BARE` or `BROKEN`, the machine is where they end."""
BYTES = {
    (E3, BYTE_80): E3_80,
    (EF, BYTE_BC): EF_BC,
    (E3_80, BYTE_82): FULL,
    (EF_BC, BYTE_81): FULL,
    (EF_BC, BYTE_9F): FULL,
}
"""The marks U+3002, U+FF01 and U+FF1F where their three bytes are several tokens."""
QUOTE_BYTES = (b"\xe2\x80", b"\x99", b"\x9d")
"""Closing quotes U+2019 and U+201D where they are two tokens: behind a mark, both go on with its sentence."""


def sentence_classes(tokenizer: Any) -> Tensor:
    """The class of every token of a Hugging Face tokenizer, uint8 [vocab]: how it begins + 16 * how it ends."""
    special = set(tokenizer.all_special_ids)
    classes = torch.zeros(len(tokenizer), dtype=torch.uint8, device="cpu")
    texts = _token_texts(tokenizer)
    for token, text in enumerate(texts):
        begins, ends = (SPECIAL, ENDED) if token in special else token_class(text)
        classes[token] = begins + 16 * ends
    return classes


def token_class(text: str | bytes) -> tuple[int, int]:
    """How a token begins and ends: its text as it stands within a line, or its bytes where they are no whole characters."""
    if isinstance(text, bytes):
        return _class_of_bytes(text)
    if not text:
        return PLAIN, OTHER
    bare = text.strip()
    if not bare:
        return BLANK, _breaks(text) or OTHER
    return _begins(text, bare), _ends(text, bare)


def _breaks(blank: str) -> int:
    """How white space ends that has line breaks, 0 without: `ENDED` behind several, or where the next line is indented."""
    breaks = blank.count("\n")
    return 0 if not breaks else BROKEN if breaks == 1 and blank[-1] == "\n" else ENDED


def _begins(text: str, bare: str) -> int:
    if text[0].isspace():
        return SPACE
    if all(mark in CLOSING for mark in bare):
        return CLOSER
    for kind, marks in ((STOP, STOPS), (BANG, BANGS), (WIDE_MARK, WIDE)):
        if bare[0] in marks:
            return kind
    return ITEM if bare[0] in MARKERS or bare[0].isdigit() else PLAIN


def _ends(text: str, bare: str) -> int:
    trailing = text[len(text.rstrip()) :]
    breaks = _breaks(trailing)
    body = bare.rstrip(CLOSING)
    if not body or breaks == ENDED:
        return breaks or OTHER
    last = body[-1]
    if last in WIDE:
        return ENDED if trailing else FULL  # a quote behind white space opens the next sentence
    if last in BANGS or body.endswith(".."):
        return ENDED if trailing else HARD
    if last in STOPS:
        if _is_short(_last_word(body[:-1])):
            return breaks or DOTTED
        if breaks and body == STOPS:
            return BROKEN  # what is before it decides
        return ENDED if trailing else SOFT
    if breaks:
        return breaks
    if trailing or not last.isalnum() or len(body) < len(bare):
        return OTHER
    word = _last_word(body)
    if not _is_short(word):
        return WORD
    return SHORT if len(word) < len(text) else SHORT_IF_BARE


def _last_word(text: str) -> str:
    return re.findall(r"[\w.]*$", text)[0].lstrip(".")


def _is_short(word: str) -> bool:
    """Whether a full stop behind `word` ends no sentence."""
    return word.lower() in ABBREVIATIONS or (len(word.split(".")[-1]) == 1 and word[-1:].isalpha() and word.isascii())


def _class_of_bytes(raw: bytes) -> tuple[int, int]:
    if raw in QUOTE_BYTES:
        return CLOSER, OTHER
    heads = {0x80: BYTE_80, 0xBC: BYTE_BC, 0x82: BYTE_82, 0x81: BYTE_81, 0x9F: BYTE_9F}
    begins = heads.get(raw[0], PLAIN) if len(raw) == 1 else SPACE if raw[:1].isspace() else PLAIN
    for tail, kind in ((b"\xe3\x80", E3_80), (b"\xef\xbc", EF_BC), (b"\xe3", E3), (b"\xef", EF)):
        if raw.endswith(tail):
            return begins, kind
    return begins, OTHER


def _token_texts(tokenizer: Any) -> list[str | bytes]:
    """Each token's text as it stands behind a word, with the white space that it brings; bytes where it is no text."""
    anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
    before = tokenizer.decode(anchor, clean_up_tokenization_spaces=False)
    pairs = [[*anchor, token] for token in range(len(tokenizer))]
    texts = tokenizer.batch_decode(pairs, clean_up_tokenization_spaces=False)
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    alphabet = _byte_alphabet()
    out: list[str | bytes] = []
    for text, piece in zip(texts, pieces):
        own = text[len(before) :]
        if "\N{REPLACEMENT CHARACTER}" in own and piece is not None:
            byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
            if byte is not None:
                out.append(bytes([int(byte[1], 16)]))
                continue
            if all(char in alphabet for char in piece):
                out.append(bytes(alphabet[char] for char in piece))
                continue
        out.append(own)
    return out


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def advance(state: int, token_class_: int) -> tuple[int, bool]:
    """The state after a token of a class, and whether a sentence begins with that token."""
    begins, ends = token_class_ % 16, token_class_ // 16
    before, line = state % 16, min(state // 16 + 1, WRAPPED[1] + 1)
    after, starts = _advance(before, begins, ends)
    if after == BROKEN and not (WRAPPED[0] <= line <= WRAPPED[1] and (before != BROKEN or begins != BLANK)):
        after = ENDED
    # White space behind a mark is `ENDED` without a line's end.
    return after + (0 if ends in (ENDED, BROKEN) else 16 * line), starts


def _advance(state: int, begins: int, ends: int) -> tuple[int, bool]:
    """`advance` for states without lines; `BROKEN` after every line break behind which a sentence might go on."""
    if (state, begins) in BYTES:
        return BYTES[state, begins], False
    if begins == BLANK:
        if state in (*PENDING, FULL, ENDED) or (state == BROKEN and ends == OTHER):
            return ENDED, False
        return ends, state == START
    if begins == CLOSER and state in (*PENDING, FULL, DOTTED):
        return (ENDED if ends in (ENDED, BROKEN) else state), False
    starts = (
        state in (START, ENDED)
        or (state == FULL and begins not in (WIDE_MARK, BANG, STOP))
        or (state in PENDING and begins in (SPACE, SPECIAL))
        or (state == BROKEN and begins in (SPACE, SPECIAL, ITEM))
    )
    if begins == STOP and ends == SOFT and state == SHORT:
        return DOTTED, starts
    if begins == STOP and ends == BROKEN:
        return (BROKEN if state == SHORT else ENDED), starts
    if begins in (STOP, BANG) and state in (HARD, FULL) and ends in PENDING:
        return state, starts
    if ends == SHORT_IF_BARE:
        return (WORD if state in (WORD, SHORT) else SHORT), starts
    return ends, starts


def sentence_starts(ids: Sequence[int] | Tensor, classes: Tensor, state: int = START) -> tuple[Tensor, int]:
    """(bool [n]: which of ids [n] begin a sentence, the state behind them); `state` is that before them."""
    own = classes[torch.as_tensor(ids, dtype=torch.int64, device="cpu")].tolist()
    out = torch.zeros(len(own), dtype=torch.bool, device="cpu")
    for place, kind in enumerate(own):
        state, out[place] = advance(state, kind)
    return out, state


def state_behind(ids: Sequence[int] | Tensor, classes: Tensor) -> int:
    """The state behind ids [n], read from the last tokens that decide it."""
    own = classes[torch.as_tensor(ids, dtype=torch.int64, device="cpu")]
    begins, ends = own % 16, own // 16
    deciding = torch.isin(begins, torch.tensor(ALONE, dtype=own.dtype, device="cpu"))
    alone = torch.nonzero(deciding & (ends != SHORT_IF_BARE) & (ends != BROKEN))[:, 0]
    breaks = torch.nonzero((ends == ENDED) | (ends == BROKEN))[:, 0]

    def last(places: Tensor, before: int) -> int:
        """The last of ascending `places` before one, 0 without."""
        count = int((places < before).sum())
        return int(places[count - 1]) if count else 0

    begun, line = last(breaks, len(own)), WRAPPED[1] + 1  # tokens of a line count as far as that
    if last(alone, len(own)) <= begun:  # the last break itself says where the sentence stands, by the line that it ends
        begun = max(last(breaks, begun), begun - line)
    at = last(alone, max(begun, len(own) - 1 - line) + 1)
    return sentence_starts(ids[at:], classes)[1]


def sentence_ends(ids: Sequence[int] | Tensor, classes: Tensor) -> Tensor:
    """bool [n]: which of ids [n] are the last of a sentence. The last token is; classes uint8 [vocab]."""
    starts, _ = sentence_starts(ids, classes)
    ends = torch.ones(len(starts), dtype=torch.bool, device="cpu")
    ends[:-1] = starts[1:]
    return ends


def bucket_lengths(starts: Tensor, longest: int) -> Tensor:
    """Lengths int64 of the sentences that begin at `starts` bool [n]; longer ones than `longest` tokens are split evenly.

    Tokens before the first start are a sentence of their own.
    """
    edges = torch.nonzero(starts)[:, 0].tolist()
    edges = [0, *(edge for edge in edges if edge > 0), len(starts)]
    lengths: list[int] = []
    for length in (end - begin for begin, end in itertools.pairwise(edges)):
        pieces = -(-length // longest)
        lengths += [length // pieces + (piece < length % pieces) for piece in range(pieces)]
    return torch.tensor(lengths, dtype=torch.int64, device="cpu")
