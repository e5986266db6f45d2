"""Profiles of tiny random models, of all sections that their methods read: what is measured means little, but all that follows is real.

A random model answers no question, so that needle tests would tell no retrieval heads: here an answer is what the model goes on with.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from semkv.profiles.calibration import (
    STEPS,
    CalibrationData,
    CalibrationSettings,
    Job,
    MeasureData,
    MeasureSettings,
    run_steps,
)
from semkv.profiles.calibration.needles import NeedleQuestion, NeedleTest
from semkv.profiles.calibration.samples import SampleSet
from semkv.profiles.schema import Profile

ANSWER, FIRST = 5, 5
"""Tokens of an answer; the first id that is no special token."""
TRAINING = CalibrationSettings(
    length=128, queries=8, max_steps=1, sequences=1, held_out=1, gate_hidden=8, budgets=(0.5,)
)
MEASURING = MeasureSettings.checked(
    length=96,
    steps=8,
    samples=2,
    held_out=1,
    keep=16,
    observation=4,
    sketch_stages=2,
    sketch_rounds=2,
    pass_recall=0.0,
)


def tiny_profile(model: PreTrainedModel, vocabulary: int) -> tuple[Profile, dict[str, str]]:
    """A profile of `model` from a few random tokens, and why steps were left out, by step."""

    def draw(n: int, seed: int) -> torch.Tensor:
        return torch.randint(FIRST, vocabulary, (n,), generator=torch.Generator().manual_seed(seed))

    sets = tuple(SampleSet(name, (draw(104, i),), (draw(104, 9 + i),)) for i, name in enumerate(("one", "two")))
    context = draw(96, 5)
    questions = []
    for seed in range(4):
        asked = draw(7, seed)
        answer = _goes_on(model, torch.cat([context, asked]))
        questions.append(NeedleQuestion(tuple(asked.tolist()), answer, tuple(range(20, 45))))
    measured = MeasureData(sets, (NeedleTest(context, tuple(questions)),), "random tokens", words(vocabulary))
    data = CalibrationData((draw(TRAINING.length + 8, TRAINING.length),), (draw(136, 1),), "random tokens")
    job = Job(model, "tiny", "", data, TRAINING, measured, MEASURING, False)
    with tempfile.TemporaryDirectory() as work:
        made = run_steps(job, STEPS, work=Path(work))
    return made.profile, {step: made.notes[step] for step in made.skipped}


def _goes_on(model: PreTrainedModel, ids: torch.Tensor) -> tuple[int, ...]:
    """The `ANSWER` tokens that the model gives the highest logits, one after the other."""
    with torch.no_grad():
        for _ in range(ANSWER):
            ids = torch.cat([ids, model(ids[None], use_cache=False).logits[0, -1:].argmax(-1)])
    return tuple(ids[-ANSWER:].tolist())


def words(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of as many words, every sixth a full stop."""
    known = {("." * (i // 6 + 1) if i % 6 == 5 else f"word{i}"): i for i in range(vocabulary)}
    core = Tokenizer(models.WordLevel(known, unk_token="word0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="word0")


__all__ = ["MEASURING", "TRAINING", "tiny_profile", "words"]
