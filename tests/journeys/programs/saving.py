"""Conversations and compiled models as files, read in this process and in fresh ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from journey import GREEDY, Desk, Result, continued, journey
from torch import Tensor

import semkv


def parts(desk: Desk) -> tuple[Tensor, Tensor, Tensor]:
    """A prompt with its question, what is said next, and what comes last."""
    haystack = desk.haystack("single", 500, 3)
    first, second, third = haystack.questions
    return (
        desk.ids(haystack.context + first.text),
        desk.ids("." + second.text, start=False),
        desk.ids("." + third.text, start=False),
    )


def conversation_plainly(model: Any, desk: Desk) -> Result:
    text, *more = parts(desk)
    answers = []
    for turn in (*more, None):
        answers.append(continued(model, text, 3))
        if turn is not None:
            text = torch.cat([text, torch.tensor([answers[-1]]), turn], 1)
    return answers


@journey("sekv", plain=conversation_plainly, same=True)
def conversation_saved_and_read_again(model: Any, desk: Desk) -> Result:
    """Saved after each turn, between one and the next; the copy in memory goes on alike."""
    text, *more = parts(desk)
    state = model.prefill(text)
    answers = [continued(model, text, 3, state=state)]
    for number, turn in enumerate(more):
        state.save(desk.folder / f"turn {number}.safetensors")
        again = model.load_state(desk.folder / f"turn {number}.safetensors")
        assert again.ids[0].tolist() == state.ids[0].tolist()
        kept = model.generate(turn, state=state, max_new_tokens=3, **GREEDY)
        read = model.generate(turn, state=again, max_new_tokens=3, **GREEDY)
        assert torch.equal(kept, read)
        desk.check(again)
        state = again
        answers.append(read[0, turn.shape[1] :].tolist())
    return answers


def in_a_fresh_process(folder: Path, state: str | None, ids: list[int]) -> list[int]:
    """Load the artifact in `folder` and go on from the saved state, or read a prompt; the new tokens."""
    compiled = semkv.load(folder / "artifact")
    given = {} if state is None else {"state": compiled.load_state(folder / state)}
    out = compiled.generate(torch.tensor([ids]), max_new_tokens=3, **given, **GREEDY)
    return out[0, len(ids) :].tolist()


def workers_plainly(model: Any, desk: Desk) -> Result:
    return conversation_plainly(model, desk)[:2]


@journey("snapkv", plain=workers_plainly, alone=True)
def workers_that_load_the_artifact(model: Any, desk: Desk) -> Result:
    """Two fresh processes load one artifact: one reads a prompt, the other goes on with a conversation that was saved."""
    text, turn, _ = parts(desk)
    model.save(desk.folder / "artifact")
    state = model.prefill(text)
    continued(model, text, 3, state=state)
    state.save(desk.folder / "state.safetensors")
    jobs = [
        desk.workers.submit(in_a_fresh_process, desk.folder, None, text[0].tolist()),
        desk.workers.submit(in_a_fresh_process, desk.folder, "state.safetensors", turn[0].tolist()),
    ]
    return [job.result(240) for job in jobs]
