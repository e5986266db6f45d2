"""Conversations in turns, through a chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from journey import GREEDY, Desk, Result, continued, journey
from torch import Tensor
from transformers import StoppingCriteria

from semkv.model.huggingface import CACHE

TEMPLATE = "{{ bos_token }}{% for m in messages %} {{ m['content'] }}{% if m['role'] == 'assistant' %} .{% endif %}{% endfor %}"
ANSWER = 3
"""Words of an answer."""


def talk(desk: Desk, reply: Callable[[Tensor], list[int]], turns: int = 5) -> Result:
    """The answers of a chat about a text; `reply` answers the whole conversation int64 [1, n]."""
    haystack = desk.haystack("single", 700, turns)
    desk.tokenizer.chat_template = TEMPLATE
    messages = [{"role": "system", "content": haystack.context}]
    answers = []
    for question in haystack.questions:
        messages.append({"role": "user", "content": question.text.strip()})
        ids = desk.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        answers.append(reply(torch.tensor([ids], dtype=torch.int64, device="cpu")))
        messages.append({"role": "assistant", "content": desk.tokenizer.decode(answers[-1])})
    return answers


def talk_plainly(model: Any, desk: Desk) -> Result:
    return talk(desk, lambda ids: continued(model, ids, ANSWER))


@journey("sekv", plain=talk_plainly, same=True)
def chat_passing_new_tokens_alone(model: Any, desk: Desk) -> Result:
    state, seen = None, 0

    def reply(ids: Tensor) -> list[int]:
        nonlocal state, seen
        if state is None:
            seen = ids.shape[1] - 1
            state = model.prefill(ids[:, :seen])
        new = ids[:, seen:]
        made = model.generate(new, state=state, max_new_tokens=ANSWER, **GREEDY)[0, new.shape[1] :].tolist()
        desk.check(state)
        seen = ids.shape[1] + len(made)
        return made

    return talk(desk, reply)


@journey("sketch", plain=talk_plainly, same=True)
def chat_passing_everything_again(model: Any, desk: Desk) -> Result:
    state = None

    def reply(ids: Tensor) -> list[int]:
        nonlocal state
        state = model.prefill(ids) if state is None else state
        made = continued(model, ids, ANSWER, state=state)
        assert state.ids[0].tolist() == ids[0].tolist() + made
        desk.check(state)
        return made

    return talk(desk, reply)


@journey("quest", same=True)
def chat_over_the_returned_cache(model: Any, desk: Desk) -> Result:
    """transformers' own idiom, the same lines for both models."""
    cache = None

    def reply(ids: Tensor) -> list[int]:
        nonlocal cache
        given = {} if cache is None else {CACHE: cache}
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=ANSWER,
            return_dict_in_generate=True,
            **given,
            **GREEDY,
        )
        cache = out[CACHE]
        return out.sequences[0, ids.shape[1] :].tolist()

    return talk(desk, reply)


def users_plainly(model: Any, desk: Desk) -> Result:
    haystack = desk.haystack("single", 600, 6)
    answers = []
    for user in range(3):
        text = haystack.context
        for question in haystack.questions[2 * user : 2 * user + 2]:
            text += question.text
            answers.append(continued(model, desk.ids(text), ANSWER))
            text += " " + desk.tokenizer.decode(answers[-1])
    return answers


@journey("snapkv", plain=users_plainly)
def users_that_share_a_system_prompt(model: Any, desk: Desk) -> Result:
    """The prompt is read once; every user goes on from a fork, two turns each, in turn."""
    haystack = desk.haystack("single", 600, 6)
    prompt = model.prefill(desk.ids(haystack.context))
    forks = [prompt.fork() for _ in range(3)]
    answers: list[Any] = [None] * 6
    for turn in range(2):
        for user, state in enumerate(forks):
            new = desk.ids(haystack.questions[2 * user + turn].text, start=False)
            out = model.generate(new, state=state, max_new_tokens=ANSWER, **GREEDY)
            answers[2 * user + turn] = out[0, new.shape[1] :].tolist()
            desk.check(state)
    assert prompt.lengths == [desk.ids(haystack.context).shape[1]]
    return answers


class Calls(StoppingCriteria):
    """Ends a row where it calls its tool: at any of these tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = torch.tensor(tokens, dtype=torch.int64, device="cpu")

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.isin(input_ids[:, -1], self.tokens)


def tool(desk: Desk) -> tuple[Tensor, Calls, Tensor]:
    """A prompt, the call, and the tool's output."""
    haystack = desk.haystack("single", 500, 2)
    numbers = desk.ids(" ".join(str(n) for n in range(10, 100)), start=False)[0].tolist()
    output = desk.ids(". the clerks counted 41 boxes ." + haystack.questions[1].text, start=False)
    return desk.ids(haystack.context + haystack.questions[0].text), Calls(numbers), output


def tool_plainly(model: Any, desk: Desk) -> Result:
    prompt, calls, output = tool(desk)
    first = continued(model, prompt, 8, stopping_criteria=[calls])
    text = torch.cat([prompt, torch.tensor([first]), output], 1)
    return [first, continued(model, text, 5)]


@journey("sentencekv", plain=tool_plainly)
def tool_call_whose_output_is_appended(model: Any, desk: Desk) -> Result:
    prompt, calls, output = tool(desk)
    state = model.prefill(prompt)
    first = continued(model, prompt, 8, state=state, stopping_criteria=[calls])
    assert len(first) == 1, "a number comes first"
    model.extend(state, output[:, :-1])
    out = model.generate(output[:, -1:], state=state, max_new_tokens=5, **GREEDY)
    desk.check(state)
    return [first, out[0, 1:].tolist()]
