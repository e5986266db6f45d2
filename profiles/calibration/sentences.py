"""The classes of a tokenizer's tokens that sentence buckets are cut by (SentenceKV)."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.methods.sentences import FULL, HARD, SOFT, sentence_classes, sentence_ends
from semkv.profiles.schema import SentenceSection

from .measure import Measure, Outcome, Subject, Sums


class Sentences(Measure):
    """Classes from the tokenizer alone; the samples tell how long sentences are."""

    name = "sentences"
    field = "sentences"
    prefix = "sentences."

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._classes: Tensor | None = None

    @property
    def units(self) -> int:
        return len(self.subject.data.measured)

    @property
    def classes(self) -> Tensor | None:
        """uint8 [vocab of the model], None where there is no tokenizer."""
        tokenizer, size = self.subject.data.tokenizer, self.subject.program.vocab_size
        if self._classes is None and tokenizer is not None:
            own = sentence_classes(tokenizer)[:size]
            self._classes = torch.nn.functional.pad(own, (0, size - len(own)))
        return self._classes

    def measure(self, unit: int, sums: Sums) -> None:
        """Count the sentences of one sample."""
        if self.classes is None:
            return
        _, ids = self.subject.data.measured[unit]
        places = torch.nonzero(sentence_ends(ids, self.classes))[:, 0]
        lengths = torch.diff(places, prepend=torch.tensor([-1], dtype=torch.int64, device="cpu"))
        sums.add("sentences", float(len(lengths)))
        sums.add("tokens", float(len(ids)))
        sums.largest("longest", float(lengths.max()))

    def finish(self, sums: Sums) -> Outcome:
        """The section, with the mean and longest sentence of the samples."""
        if self.classes is None:
            return Outcome(
                None, note="the samples come without a tokenizer, whose tokens are to be classed: pass it on"
            )
        tokens = min(len(self.subject.data.tokenizer), self.subject.program.vocab_size)
        ends = self.classes.long() // 16
        mean = float(sums["tokens"] / sums["sentences"])
        section = SentenceSection(
            tokens=tokens,
            marks=int(torch.isin(ends, torch.tensor([SOFT, HARD, FULL], dtype=torch.int64, device="cpu")).sum()),
            mean_tokens=round(mean, 3),
            longest=int(sums["longest"]),
            samples=self.units,
        )
        return Outcome(section, {"sentences.classes": self.classes}, f"sentences have {mean:.1f} tokens on the mean")
