"""Likelihoods: choices scored over forks, whole sequences with labels, rolling windows."""

from __future__ import annotations

from typing import Any

import torch
from journey import Desk, Result, journey
from torch import Tensor

from semkv.profiles.bundled.tasks import make_text


def likelihood(logits: Tensor, ids: Tensor) -> float:
    """Nats of ids int64 [n], given the logits [n, vocab] before each."""
    chosen = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, None])
    return float(chosen.detach().sum())


def choices(desk: Desk) -> tuple[Tensor, list[Tensor]]:
    """A question about a context, and the answers to choose from."""
    haystack = desk.haystack("single", 450)
    question = haystack.questions[0]
    others = ("10 11 12", "brass kettle", question.answer[::-1].replace("  ", " ").split()[0] + " 44 .")
    return (
        desk.ids(haystack.context + question.text),
        [desk.ids(text, start=False) for text in (question.answer, *others)],
    )


def choices_plainly(model: Any, desk: Desk) -> Result:
    context, answers = choices(desk)
    scores = []
    for answer in answers:
        logits = model(torch.cat([context, answer], 1)).logits
        scores.append(likelihood(logits[0, context.shape[1] - 1 : -1], answer[0]))
    return [max(range(len(scores)), key=scores.__getitem__), scores]


def choices_over_forks(model: Any, desk: Desk, *, numbers: bool) -> Result:
    context, answers = choices(desk)
    read = model.prefill(context)
    scores = []
    for answer in answers:
        branch = read.fork()
        logits = torch.cat([branch.logits[:, None], model.extend(branch, answer, all_logits=True)], 1)
        scores.append(likelihood(logits[0, :-1], answer[0]))
        desk.check(branch)
    return [max(range(len(scores)), key=scores.__getitem__), scores if numbers else []]


@journey("sekv", plain=choices_plainly)
def choices_scored_over_forks(model: Any, desk: Desk) -> Result:
    """As lm_eval scores: the context is read, and compressed, once."""
    return choices_over_forks(model, desk, numbers=True)


@journey("quest", plain=lambda model, desk: [choices_plainly(model, desk)[0], []], same=True)
def the_best_of_the_choices(model: Any, desk: Desk) -> Result:
    """The right answer is the best one, whatever the numbers."""
    best = choices_over_forks(model, desk, numbers=False)
    assert best[0] == 0
    return best


@journey("snapkv", same=True)
def whole_sequences_with_labels(model: Any, desk: Desk) -> Result:
    """Logits of all positions and the loss, with a padded batch: a prompt's logits are those of full attention."""
    ids = desk.ids(make_text(350, desk.seed))
    with torch.no_grad():
        out = model(ids, labels=ids)
        masked = ids.clone()
        masked[:, :100] = -100
        second = model(input_ids=ids, labels=masked, use_cache=False)
    return [float(out.loss), float(second.loss), likelihood(out.logits[0, :-1], ids[0, 1:])]


@journey("sketch", same=True)
def rolling_perplexity(model: Any, desk: Desk) -> Result:
    """Windows with a stride, as transformers' page on perplexity has them: the same lines for both models."""
    ids = desk.ids(make_text(700, desk.seed))
    length, stride, before, nats = 300, 150, 0, []
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + length, ids.shape[1])
        window = ids[:, begin:end]
        labels = window.clone()
        labels[:, : -(end - before)] = -100
        with torch.no_grad():
            loss = model(window, labels=labels).loss
        nats.append(float(loss))
        before = end
        if end == ids.shape[1]:
            break
    return nats


def text_in_pieces_plainly(model: Any, desk: Desk) -> Result:
    ids = desk.ids(make_text(500, desk.seed))
    with torch.no_grad():
        logits = model(ids).logits
    return [likelihood(logits[0, 199:-1], ids[0, 200:])]


@journey("compresskv", plain=text_in_pieces_plainly)
def perplexity_over_a_state(model: Any, desk: Desk) -> Result:
    """A text scored as it is read on, in pieces: each token under the memory that there is then."""
    ids = desk.ids(make_text(500, desk.seed))
    state = model.prefill(ids[:, :200])
    logits = [state.logits[:, None]]
    for piece in ids[:, 200:].split(64, 1):
        logits.append(model.extend(state, piece, all_logits=True))
    desk.check(state)
    return [likelihood(torch.cat(logits, 1)[0, :-1], ids[0, 200:])]
