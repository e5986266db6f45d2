"""Long documents: read once and asked many times, growing by chunks, branching."""

from __future__ import annotations

import copy
from typing import Any

import torch
from journey import GREEDY, Desk, Result, continued, journey

ANSWER = 3


def ten_plainly(model: Any, desk: Desk) -> Result:
    haystack = desk.haystack("confusable", 1100, 10)
    return [continued(model, desk.ids(haystack.context + one.text), ANSWER) for one in haystack.questions]


@journey("sekv", plain=ten_plainly, same=True)
def ten_questions_about_a_document(model: Any, desk: Desk) -> Result:
    haystack = desk.haystack("confusable", 1100, 10)
    document = model.prefill(desk.ids(haystack.context))
    answers = []
    for one in haystack.questions:
        question, branch = desk.ids(one.text, start=False), document.fork()
        out = model.generate(question, state=branch, max_new_tokens=ANSWER, **GREEDY)
        answers.append(out[0, question.shape[1] :].tolist())
        desk.check(branch)
    desk.check(document)
    return answers


def passages(desk: Desk) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Chunks of a context as a search finds them, and a question after each."""
    stacks = [desk.haystack("single", 220 + 60 * place) for place in range(4)]
    chunks = [desk.ids(stack.context + " ", start=place == 0) for place, stack in enumerate(stacks)]
    return chunks, [desk.ids(stack.questions[0].text, start=False) for stack in stacks]


def growing_plainly(model: Any, desk: Desk) -> Result:
    chunks, asked = passages(desk)
    return [continued(model, torch.cat([*chunks[: n + 1], asked[n]], 1), ANSWER) for n in range(len(chunks))]


@journey("sketch", plain=growing_plainly)
def context_that_grows_by_passages(model: Any, desk: Desk) -> Result:
    """Each passage is appended, and a question about it is asked on a fork."""
    chunks, asked = passages(desk)
    state, answers = None, []
    for chunk, question in zip(chunks, asked):
        if state is None:
            state = model.prefill(chunk)
        else:
            model.extend(state, chunk)
        branch = state.fork()
        out = model.generate(question, state=branch, max_new_tokens=ANSWER, **GREEDY)
        answers.append(out[0, question.shape[1] :].tolist())
        desk.check(branch)
    return answers


CHANGES = ("remember that brass kettle has 11 22 33 as its code .", "the code for brass kettle is 44 55 66 .", "")
ASKED = " what is the code for brass kettle ? the code for brass kettle is"


def branches_plainly(model: Any, desk: Desk) -> Result:
    context = desk.haystack("dense", 350).context
    return [continued(model, desk.ids(f"{context} {change}{ASKED}"), 5) for change in CHANGES]


@journey("semanticache", plain=branches_plainly)
def branches_of_what_if(model: Any, desk: Desk) -> Result:
    """Deep copies of one state that are told different things."""
    base = model.prefill(desk.ids(desk.haystack("dense", 350).context))
    answers = []
    for change in CHANGES:
        branch, more = copy.deepcopy(base), desk.ids(change + ASKED, start=False)
        out = model.generate(more, state=branch, max_new_tokens=5, **GREEDY)
        answers.append(out[0, more.shape[1] :].tolist())
        desk.check(branch)
    return answers
