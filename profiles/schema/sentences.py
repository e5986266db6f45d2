"""What calibration knows of a tokenizer's sentences."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .facts import ModelFacts, NotNegative, Section


class SentenceSection(Section):
    """How each token begins and ends, for sentence buckets (SentenceKV).

    Tensor `sentences.classes` uint8 [vocab]: see `semkv.methods.sentences`; 0 beyond the tokenizer's own tokens.

    Attributes
    ----------
    rules: 1 ends a sentence at every line break, 2 where the line is not one of wrapped prose. tokens: of the tokenizer. marks: those
        that may end a sentence.
    mean_tokens: mean length of a sentence in the calibration text, in tokens. longest: the longest one there.
    samples: texts that these two were measured on.
    """

    rules: Literal[1, 2] = 2
    tokens: int = Field(ge=1)
    marks: int = Field(ge=0)
    mean_tokens: NotNegative
    longest: int = Field(ge=1)
    samples: int = Field(ge=1)

    def check(self, model: ModelFacts) -> None:
        """Raise `ValueError` where the tokenizer has more tokens than the model knows."""
        if self.tokens > model.vocab_size:
            raise ValueError(
                f"sentences.tokens is {self.tokens}, more than the model's vocabulary of {model.vocab_size}"
            )

    def tensor_shapes(self, model: ModelFacts) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that this section needs."""
        return {"sentences.classes": (model.vocab_size,)}
