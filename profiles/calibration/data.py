"""Calibration text as token sequences: files of plain text or JSON lines, or the bundled model's own generated text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semkv.errors import ConfigError

from .settings import CalibrationSettings


@dataclass(frozen=True)
class CalibrationData:
    """Token sequences int64 [length + queries] to train on, and others held out.

    description: what the text is, for the provenance.
    """

    training: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    description: str

    @property
    def sequences(self) -> tuple[Tensor, ...]:
        return self.training + self.held_out

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.sequences)

    def digest(self) -> str:
        """sha256 over all token ids in order."""
        state = hashlib.sha256()
        for ids in self.sequences:
            state.update(len(ids).to_bytes(8, "little"))
            state.update(ids.to(torch.int32).numpy().tobytes())
        return state.hexdigest()


def read_documents(path: Path) -> Iterator[str]:
    """The documents of a file: one for plain text, one per line (field `text`) for `.jsonl`."""
    if not path.is_file():
        raise ConfigError(f"calibration file {path} does not exist: pass a text or .jsonl file (field 'text')")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"calibration file {path} is not readable as UTF-8 ({error}): convert it") from None
    if path.suffix != ".jsonl":
        if not text.strip():
            raise ConfigError(f"calibration file {path} is empty: pass a file with running text")
        yield text
        return
    found = False
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"calibration file {path}, line {number}: expected a JSON object with a string field 'text'"
            ) from None
        if not isinstance(document, str):
            kind = type(document).__name__
            raise ConfigError(f"calibration file {path}, line {number}: the field 'text' is {kind}, no string")
        if document.strip():
            found = True
            yield document
    if not found:
        raise ConfigError(f"calibration file {path} is empty: no line has text in its field 'text'")


def text_data(paths: Sequence[str | Path], tokenizer: Any, settings: CalibrationSettings) -> CalibrationData:
    """Cut the files' text into sequences.

    Documents are joined in order; every sequence starts with the tokenizer's bos token where it has one. The last tenth
    of the tokens (at least one sequence) is held out. Raises `ConfigError` for missing, empty or too short files.
    """
    if not paths:
        raise ConfigError("no calibration file was given: pass --data with a text or .jsonl file")
    stream: list[int] = []
    for path in paths:
        for document in read_documents(Path(path)):
            stream.extend(tokenizer(document + "\n", add_special_tokens=False)["input_ids"])
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    full = settings.length + settings.queries - len(bos)
    if len(stream) < 2 * full:
        raise ConfigError(
            f"the calibration text has {len(stream)} tokens, but length {settings.length} with {settings.queries} "
            f"queries needs at least {2 * full} (one sequence to train, one held out): pass more text or a smaller "
            "--length"
        )
    held = min(settings.held_out, max(1, len(stream) // 10 // full))
    ids = torch.tensor(stream, dtype=torch.int64, device="cpu")
    prefix = torch.tensor(bos, dtype=torch.int64, device="cpu")
    body, tail = ids[: len(ids) - held * full], ids[len(ids) - held * full :]
    count = min(settings.sequences, len(body) // full)
    # Spread over all of the text, so that few sequences still see each file.
    starts = [round(i * (len(body) - full) / max(1, count - 1)) for i in range(count)]
    training = tuple(torch.cat([prefix, body[start : start + full]]) for start in starts)
    held_out = tuple(torch.cat([prefix, tail[i * full : (i + 1) * full]]) for i in range(held))
    names = ", ".join(Path(path).name for path in paths)
    return CalibrationData(training, held_out, f"plain text: {names}")


def bundled_data(tokenizer: Any, settings: CalibrationSettings, *, with_tasks: bool = False) -> CalibrationData:
    """The bundled model's own text: filler alone, as the paper trains on plain text, or with tasks and their questions.

    With tasks, contexts are haystacks of every family in turn and the queries are questions about them with answers;
    the seeds are apart from those of the model's training and of evaluation.
    """
    from semkv.profiles.bundled.tasks import FAMILIES, make_haystack, make_text

    bos = torch.tensor([tokenizer.bos_token_id], dtype=torch.int64, device="cpu")

    def filler(length: int, seed: int) -> Tensor:
        text = make_text(length + settings.queries + 64, seed)
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64, device="cpu")

    def tasks(length: int, seed: int) -> Tensor:
        family = FAMILIES[seed % len(FAMILIES)]
        asked = max(1, min(settings.queries // 8, length // 64))
        stack = make_haystack(family, length - 1, seed, n_questions=asked)
        text = " ".join(f"{question.text.strip()} {question.answer} ." for question in stack.questions)
        questions = tokenizer(text, add_special_tokens=False)["input_ids"][: settings.queries]
        context = tokenizer(stack.context, add_special_tokens=False)["input_ids"]
        # Prose in front fills what the haystack and its questions leave free.
        short = length - 1 + settings.queries - len(context) - len(questions)
        prose = tokenizer(make_text(short + 64, seed), add_special_tokens=False)["input_ids"][:short] if short else []
        return torch.tensor(prose + context + questions, dtype=torch.int64, device="cpu")

    make: Callable[[int, int], Tensor] = tasks if with_tasks else filler

    def sequence(length: int, number: int) -> Tensor:
        ids = torch.cat([bos, make(length, 7_000_000 + 10_007 * settings.seed + number)])[: length + settings.queries]
        if len(ids) < length + settings.queries:
            raise ConfigError(f"generated text has {len(ids)} of {length + settings.queries} tokens: use fewer queries")
        return ids

    training = tuple(sequence(settings.length, i) for i in range(settings.sequences))
    held_out = tuple(sequence(settings.length, settings.sequences + i) for i in range(settings.held_out))
    label = "bundled text with tasks (haystacks of every family, questions and answers as queries)"
    return CalibrationData(training, held_out, label if with_tasks else "bundled text, filler prose alone")
