"""What people do after Ctrl-C, and after an error on the way: try again, or go on."""

from __future__ import annotations

from typing import Any

import torch
from journey import GREEDY, Desk, Result, continued, journey, refusal
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from semkv.errors import StateError

NEW = 8


class Breaks(BaseStreamer):
    """A streamer that raises `error` at the token of a number."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.left, self.error = at + 1, error  # the prompt comes first

    def put(self, value: Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error

    def end(self) -> None:
        raise AssertionError("it was to break")


class BreaksRows(StoppingCriteria):
    """The same for batches, which have no streamers."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.left, self.error = at, error

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return torch.zeros(len(input_ids), dtype=torch.bool, device="cpu")


def asked(desk: Desk) -> tuple[Tensor, Tensor]:
    haystack = desk.haystack("single", 420)
    return desk.ids(haystack.context), desk.ids(haystack.questions[0].text, start=False)


def once_plainly(model: Any, desk: Desk) -> Result:
    made = continued(model, torch.cat(asked(desk), 1), NEW)
    return [made, made]


@journey("sekv", plain=once_plainly)
def interrupt_and_try_again_from_a_fork(model: Any, desk: Desk) -> Result:
    context, question = asked(desk)
    before = model.prefill(context)
    out = []
    for at in (1, 4):
        state = before.fork()
        options = {"streamer": Breaks(at, KeyboardInterrupt()), "max_new_tokens": NEW, **GREEDY}
        refusal(
            KeyboardInterrupt, lambda state=state, options=options: model.generate(question, state=state, **options)
        )
        state = before.fork()
        made = model.generate(question, state=state, max_new_tokens=NEW, **GREEDY)
        out.append(made[0, question.shape[1] :].tolist())
        desk.check(state)
    return out


def on_plainly(model: Any, desk: Desk) -> Result:
    return [continued(model, torch.cat(asked(desk), 1), NEW)] * 2


@journey("streaming_llm", plain=on_plainly)
def interrupt_and_go_on_with_the_same_state(model: Any, desk: Desk) -> Result:
    """The text that was made is in the error; what the state has read is a beginning of it, and everything again goes on from there."""
    context, question = asked(desk)
    whole, out = torch.cat([context, question], 1), []
    for error in (KeyboardInterrupt(), RuntimeError("the client left")):
        state = model.prefill(context)
        options = {"streamer": Breaks(3, error), "max_new_tokens": NEW, **GREEDY}
        caught = refusal(
            type(error), lambda state=state, options=options: model.generate(whole, state=state, **options)
        )
        so_far = caught.sequences
        state.check_whole()
        assert 0 < so_far.shape[1] - whole.shape[1] < NEW
        assert so_far[0, : state.lengths[0]].tolist() == state.ids[0].tolist()[: state.lengths[0]]
        rest = model.generate(so_far, state=state, max_new_tokens=NEW + whole.shape[1] - so_far.shape[1], **GREEDY)
        out.append(rest[0, whole.shape[1] :].tolist())
        desk.check(state)
    return out


def rows_plainly(model: Any, desk: Desk) -> Result:
    context, question = asked(desk)
    return [continued(model, torch.cat([context[:, :length], question], 1), NEW) for length in (60, 420)]


@journey("h2o", plain=rows_plainly)
def batch_that_is_interrupted_and_repeated(model: Any, desk: Desk) -> Result:
    """A batch is stopped twice; what was not spoiled is used again, what was is said to be."""
    context, question = asked(desk)
    prompts = [torch.cat([context[:, :length], question], 1)[0].flip(0) for length in (60, 420)]
    ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).flip(1)
    mask = (ids != 0).long()
    state = model.prefill(ids, mask)
    for at in (1, 3):
        fork = state.fork()
        options = {"stopping_criteria": [BreaksRows(at, KeyboardInterrupt())], "max_new_tokens": NEW, **GREEDY}
        error = refusal(
            KeyboardInterrupt,
            lambda fork=fork, options=options: model.generate(ids, attention_mask=mask, state=fork, **options),
        )
        spoiled = any(row.stepping for row in fork.rows)
        if spoiled:
            assert "state.fork()" in str(refusal(StateError, fork.fork))
        else:
            assert error.sequences[:, : ids.shape[1]].tolist() == ids.tolist()
    out = model.generate(ids, attention_mask=mask, state=state, max_new_tokens=NEW, **GREEDY)
    return out[:, ids.shape[1] :].tolist()
