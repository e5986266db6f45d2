"""What the measured steps read: contexts with a continuation, in data sets, and needle tests."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semkv.errors import ConfigError

from .data import read_documents
from .measure_settings import MeasureSettings
from .needles import NeedleTest, bundled_needles, text_needles
from .records import Records

SEEDS = 7_500_000
"""First seed of the bundled samples: apart from the model's training, SeKV's calibration and evaluation."""

MOST_WORDS = 20_000
"""Words of a text that its records are made of."""


@dataclass(frozen=True)
class SampleSet:
    """One data set: sequences int64 [length + steps], the last `steps` tokens being the decode steps."""

    name: str
    measured: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]


@dataclass(frozen=True)
class MeasureData:
    """All that the measured steps read. description: of the text, for the profile. tokenizer: that made the ids. records: contexts of
    records, which the sketch is learned from beside the text."""

    sets: tuple[SampleSet, ...]
    needles: tuple[NeedleTest, ...]
    description: str
    tokenizer: Any = None
    records: tuple[Tensor, ...] = ()

    @property
    def set_names(self) -> list[str]:
        return [one.name for one in self.sets]

    @property
    def measured(self) -> list[tuple[str, Tensor]]:
        """(data set, sequence) of every sample, the data sets in turn."""
        most = max(len(one.measured) for one in self.sets)
        return [(one.name, one.measured[i]) for i in range(most) for one in self.sets if i < len(one.measured)]

    @property
    def held_out(self) -> list[tuple[str, Tensor]]:
        """(data set, sequence) of every held-out sample."""
        return [(one.name, ids) for one in self.sets for ids in one.held_out]

    @property
    def sequences(self) -> list[Tensor]:
        """All that is read but the needle tests."""
        return [*(ids for _, ids in self.measured + self.held_out), *self.records]

    def digest(self) -> str:
        """sha256 over all token ids and needle tests in order."""
        state = hashlib.sha256()
        for ids in self.sequences:
            _feed(state, ids)
        for test in self.needles:
            _feed(state, test.context)
            for question in test.questions:
                for part in (question.ids, question.answer, question.evidence):
                    _feed(state, torch.tensor(part, dtype=torch.int64, device="cpu"))
        return state.hexdigest()

    def check(self, vocab_size: int, max_positions: int | None, length: int, steps: int) -> None:
        """Raise `ConfigError` where a model of this vocabulary and context cannot read the data."""
        if max_positions is not None and length + steps > max_positions:
            raise ConfigError(
                f"length {length} with {steps} decode steps needs {length + steps} positions, the model has "
                f"{max_positions}: pass a smaller --length"
            )
        largest = max(int(ids.max()) for ids in self.sequences)
        if largest >= vocab_size:
            raise ConfigError(
                f"the data holds token id {largest}, the model's vocabulary has {vocab_size} entries: "
                "use the model's own tokenizer"
            )


def _feed(state: Any, ids: Tensor) -> None:
    state.update(len(ids).to_bytes(8, "little"))
    state.update(ids.to(torch.int32).numpy().tobytes())


def bundled_measure_data(tokenizer: Any, settings: MeasureSettings) -> MeasureData:
    """The bundled model's text: prose, and haystacks of each family whose decode steps are questions with answers."""
    from semkv.profiles.bundled.tasks import FAMILIES

    names = ("prose", *FAMILIES)
    each = -(-settings.samples // len(names))
    first = SEEDS + 100_003 * settings.seed
    sets = []
    for place, name in enumerate(names):
        made = [
            _bundled_sequence(tokenizer, name, settings, first + 1000 * place + i)
            for i in range(each + settings.held_out)
        ]
        sets.append(SampleSet(name, tuple(made[:each]), tuple(made[each:])))
    label = "bundled text: prose, and haystacks of every family with questions and answers as decode steps"
    return MeasureData(tuple(sets), bundled_needles(tokenizer, settings, first + 50_000), label, tokenizer)


def _bundled_sequence(tokenizer: Any, name: str, settings: MeasureSettings, seed: int) -> Tensor:
    """A sequence of prose or of one family; prose fills what a haystack leaves free, in front of it."""
    from semkv.profiles.bundled.tasks import make_haystack, make_text

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    n, steps = settings.length, settings.steps
    if name == "prose":
        return torch.tensor(
            [tokenizer.bos_token_id, *encode(make_text(n + steps + 64, seed))][: n + steps],
            dtype=torch.int64,
            device="cpu",
        )
    stack = make_haystack(name, n - 1, seed, n_questions=max(1, min(steps // 16, n // 64)))
    asked = " ".join(f"{question.text.strip()} {question.answer} ." for question in stack.questions)
    decoded = encode(asked)
    while len(decoded) < steps:
        decoded += encode(make_text(steps + 64, seed + 1))
    context = encode(stack.context)
    front = encode(make_text(n + 64, seed))[: n - 1 - len(context)]
    return torch.tensor([tokenizer.bos_token_id, *front, *context, *decoded[:steps]], dtype=torch.int64, device="cpu")


def text_measure_data(paths: Sequence[str | Path], tokenizer: Any, settings: MeasureSettings) -> MeasureData:
    """Samples of text files, each long enough file a data set of its own, and needle tests hidden in their text.

    The last tenth of a file (at least `settings.held_out` sequences where that is less) is held out. Files that are too
    short alone are joined to one data set. Raises `ConfigError` for missing, empty or too short files.
    """
    if not paths:
        raise ConfigError("no calibration file was given: pass --data with a text or .jsonl file")
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    full = settings.length + settings.steps - len(bos)
    streams: dict[str, list[int]] = {}
    short: list[int] = []
    words: dict[str, None] = {}  # a set in order
    for number, path in enumerate(map(Path, paths)):
        stream: list[int] = []
        for document in read_documents(path):
            stream.extend(tokenizer(document + "\n", add_special_tokens=False)["input_ids"])
            if len(words) < MOST_WORDS:
                words |= dict.fromkeys(word for word in document.split() if word.isalpha())
        name = path.name if path.name not in streams else f"{number}: {path.name}"
        if len(stream) >= 2 * full:
            streams[name] = stream
        else:
            short += stream
    if len(short) >= 2 * full:
        streams["short files"] = short
    if not streams:
        raise ConfigError(
            f"the calibration text has {len(short)} tokens, but length {settings.length} with {settings.steps} decode "
            f"steps needs at least {2 * full} (one sample to measure, one held out): pass more text or a smaller --length"
        )
    each = -(-settings.samples // len(streams))
    prefix = torch.tensor(bos, dtype=torch.int64, device="cpu")
    sets = []
    for name, stream in streams.items():
        ids = torch.tensor(stream, dtype=torch.int64, device="cpu")
        held = min(settings.held_out, max(1, len(ids) // 10 // full))
        body, tail = ids[: len(ids) - held * full], ids[len(ids) - held * full :]
        count = min(each, len(body) // full)
        starts = [round(i * (len(body) - full) / max(1, count - 1)) for i in range(count)]
        measured = tuple(torch.cat([prefix, body[start : start + full]]) for start in starts)
        held_out = tuple(torch.cat([prefix, tail[i * full : (i + 1) * full]]) for i in range(held))
        sets.append(SampleSet(name, measured, held_out))
    whole = torch.tensor([token for stream in streams.values() for token in stream], dtype=torch.int64, device="cpu")
    needles = text_needles(whole, tokenizer, settings)
    label = f"plain text: {', '.join(Path(path).name for path in paths)}"
    records = _records(list(words) or ["word"], tokenizer, settings, prefix, full)
    return MeasureData(tuple(sets), needles, label, tokenizer, records)


def _records(
    words: Sequence[str], tokenizer: Any, settings: MeasureSettings, prefix: Tensor, tokens: int
) -> tuple[Tensor, ...]:
    """`settings.sketch_records` contexts of `tokens` tokens behind `prefix`."""
    made = []
    for number in range(settings.sketch_records):
        lines, ids = iter(Records(words, SEEDS + 1000 * settings.seed + number)), list[int]()
        while len(ids) < tokens:
            text = "".join(line + "\n" for line in itertools.islice(lines, 64))
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        made.append(torch.cat([prefix, torch.tensor(ids[:tokens], dtype=torch.int64, device="cpu")]))
    return tuple(made)
