"""Continuations are scored over a context that was compressed before them."""

from __future__ import annotations

import pytest
import torch

import semkv
from semkv.errors import InputError
from semkv.evaluation.continuations import is_compressed, score_continuations


@pytest.fixture(scope="module")
def ids(base):
    return torch.randint(3, 600, (400,), generator=torch.Generator().manual_seed(0)).tolist()


def in_one_forward(base, context, continuation):
    """(log likelihood, greedy) from the logits of everything at once."""
    text = torch.tensor([[*context, *continuation]])
    logp = base(text).logits[0].log_softmax(-1)[len(context) - 1 : -1]
    own = torch.tensor(continuation)
    return float(logp.gather(1, own[:, None]).sum()), bool((logp.argmax(-1) == own).all())


def test_full_gives_what_one_forward_gives(base, ids):
    context, continuations = ids[:350], [ids[350:], ids[360:361], ids[340:352]]
    continuations.append([int(base.prefill(torch.tensor([context])).logits.argmax())])
    found = score_continuations(base, context, continuations)
    for own, (score, greedy) in zip(continuations, found):
        expected, likeliest = in_one_forward(base, context, own)
        assert score == pytest.approx(expected, abs=2e-3)
        assert greedy == likeliest
    assert [greedy for _, greedy in found] == [False, False, False, True]


def test_a_compressed_context_is_what_is_read(base, ids):
    """The score is that over the state, and another than one forward gives; no order of continuations changes any."""
    compiled = base.with_method("snapkv", 0.1)
    context, continuations = ids[:350], [ids[350:380], ids[380:]]
    found = score_continuations(compiled, context, continuations)
    for own, (score, _) in zip(continuations, found):
        state = compiled.prefill(torch.tensor([context]))
        logits = [state.logits[0]]
        for token in own[:-1]:
            logits.append(compiled.extend(state, torch.tensor([[token]]))[0, 0])
        expected = torch.stack(logits).log_softmax(-1).gather(1, torch.tensor(own)[:, None]).sum()
        assert score == pytest.approx(float(expected), abs=0.05)
        assert abs(score - in_one_forward(base, context, own)[0]) > 0.5
    backwards = score_continuations(compiled, context, continuations[::-1])
    assert [score for score, _ in backwards] == pytest.approx([score for score, _ in found[::-1]])


def test_refusals(base, ids):
    for context, continuations in (([], [[1]]), ([1], [[]])):
        with pytest.raises(InputError, match="at least one token each"):
            score_continuations(base, context, continuations)


def test_which_contexts_are_compressed(base):
    assert not is_compressed(base, 5000)
    assert is_compressed(base.with_method("snapkv", 0.1), 300)
    floor = base.with_method("snapkv", 0.1, config=semkv.CompileConfig(floor=256))
    assert [is_compressed(floor, tokens) for tokens in (200, 256, 300)] == [False, False, True]
    numbers = base.with_method("snapkv", 512)
    assert [is_compressed(numbers, tokens) for tokens in (500, 512, 513)] == [False, False, True]
    assert not is_compressed(base.with_method("snapkv", 1.0), 5000)
