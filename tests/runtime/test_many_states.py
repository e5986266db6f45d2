"""`step` over several states: each goes on as it would alone, and rows come and go between steps."""

from __future__ import annotations

import pytest
import torch

import semkv
from semkv.errors import BudgetError, InputError

METHODS = ("full", "streaming_llm", "snapkv", "quest", "sentencekv", "sketch", "sekv")
LENGTHS = (300, 411, 257)


@pytest.fixture(scope="module")
def conversations(base):
    """Prompts of several lengths, int64 [1, n] each."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, base.program.vocab_size, (1, n), generator=generator) for n in LENGTHS]


def made(base, method, budget=0.3):
    return base if method == "full" else base.with_method(method, budget)


def alone(compiled, state, steps):
    """The tokens that a state chooses greedily in so many steps of its own."""
    tokens = []
    for _ in range(steps):
        tokens.append(state.logits.argmax(-1, keepdim=True))
        compiled.extend(state, tokens[-1])
    return torch.cat(tokens, 1)


@pytest.mark.parametrize("method", METHODS)
def test_rows_go_on_as_alone(base, conversations, method):
    compiled = made(base, method)
    states = [compiled.prefill(ids) for ids in conversations]
    expected = [alone(compiled, state.fork(), 12) for state in states]
    told = [[] for _ in states]
    joined = list(range(len(states)))
    for number in range(12):
        if number == 4:
            joined.remove(1)  # one leaves
        if number == 8:
            states[2] = states[2].fork()  # and one goes on as a copy
        ids = torch.cat([states[one].logits.argmax(-1) for one in joined])
        logits = compiled.step([states[one] for one in joined], ids)
        assert logits.shape == (len(joined), compiled.program.vocab_size)
        for place, one in enumerate(joined):
            told[one].append(int(ids[place]))
            assert torch.equal(states[one].logits[0], logits[place])
    assert [state.lengths[0] - n for state, n in zip(states, LENGTHS)] == [12, 4, 12]
    for one, own in enumerate(told):
        assert own == expected[one][0, : len(own)].tolist()
    assert told[1] + alone(compiled, states[1], 8)[0].tolist() == expected[1][0].tolist()


def test_states_of_several_rows_and_pending_tokens(base, conversations):
    compiled = made(base, "sketch")
    two = compiled.prefill(torch.cat([conversations[0][:, :200], conversations[1][:, :200]]))
    one = compiled.prefill(conversations[2])
    compiled.generate(conversations[2][:, :1], state=one, max_new_tokens=3, do_sample=False)
    assert one.pending is not None
    rest = [
        compiled.extend(state.fork(), ids)[:, 0]
        for state, ids in ((two, torch.tensor([[5], [6]])), (one, torch.tensor([[7]])))
    ]
    length = one.lengths[0]
    logits = compiled.step([two, one], torch.tensor([5, 6, 7]))
    torch.testing.assert_close(logits, torch.cat(rest), atol=2e-4, rtol=1e-4)
    assert one.pending is None
    assert one.lengths[0] == length + 2


def test_a_row_that_is_exact_steps_beside_compressed_ones(base, conversations):
    """Heads of several roles are parts of their own; a short row has one part."""
    compiled = base.with_method("mixed", 0.5, config=semkv.CompileConfig(floor=256))
    states = [compiled.prefill(ids) for ids in (conversations[0][:, :100], *conversations[1:])]
    expected = [alone(compiled, state.fork(), 6) for state in states]
    told = []
    for _ in range(6):
        told.append(torch.cat([state.logits.argmax(-1) for state in states]))
        compiled.step(states, told[-1])
    assert torch.equal(torch.stack(told, 1), torch.cat(expected))


def test_refusals_change_nothing(base, conversations):
    compiled, other = made(base, "quest"), made(base, "snapkv")
    states = [compiled.prefill(ids) for ids in conversations[:2]]
    foreign = other.prefill(conversations[2])
    token = torch.tensor([5, 6])
    with pytest.raises(InputError, match="got none"):
        compiled.step([], token)
    with pytest.raises(InputError, match="given twice"):
        compiled.step([states[0], states[0]], token)
    with pytest.raises(InputError, match="another compiled model"):
        compiled.step([states[0], foreign], token)
    with pytest.raises(InputError, match=r"input_ids \(3,\): the states have 2 rows"):
        compiled.step(states, torch.tensor([1, 2, 3]))
    assert [state.lengths for state in states] == [[LENGTHS[0]], [LENGTHS[1]]]
    assert compiled.step(states, token).shape[0] == 2


def test_more_rows_than_layers_may_leave_for(base, conversations):
    """Lengths at which layers leave the device are computed for so many rows."""
    config = semkv.CompileConfig(floor=0, offload="progressive", device_memory="1GB", rows=1)
    compiled = base.with_method("quest", 0.3, config=config)
    if compiled.placement.rows is None:
        pytest.skip("all layers stay")
    states = [compiled.prefill(ids) for ids in conversations[:2]]
    with pytest.raises(BudgetError, match="2 rows"):
        compiled.step(states, torch.tensor([5, 6]))
