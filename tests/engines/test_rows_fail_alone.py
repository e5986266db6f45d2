"""A request that fails in a step, or is released, is nobody else's concern."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import semkv
from semkv.errors import CapacityError, InputError, StateError, StepError
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.state import State

METHODS = ("full", "h2o", "quest", "sketch", "sekv")
LENGTHS = (300, 411, 257)


@pytest.fixture(scope="module")
def texts(base):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, base.program.vocab_size, (1, n), generator=generator) for n in LENGTHS]


def made(base, method):
    return base if method == "full" else base.with_method(method, 0.3)


def greedy(states):
    return torch.cat([state.logits.argmax(-1) for state in states])


def steps(compiled, states, count):
    """The tokens [count, B] of greedy steps together."""
    told = []
    for _ in range(count):
        told.append(greedy(states))
        compiled.step(states, told[-1])
    return torch.stack(told)


def failing(patch, which, site, cause=None):
    """Whatever makes room in a layer fails for the row of the state `which`; with steps as graphs or without."""
    row = which.rows[0]
    for name in ("admit", "entries"):
        original = getattr(RowMemory, name)

        def act(self, place, *rest, original=original):
            if self is row and place.index == site:
                raise cause or CapacityError("no room for it")
            return original(self, place, *rest)

        patch.setattr(RowMemory, name, act)


@pytest.fixture(params=[True, False], ids=["graphs", "entries"])
def compiled_as(request, base, monkeypatch):
    """Models whose steps are graphs, and those that ask the memory layer by layer."""

    def make(method):
        if not request.param:
            monkeypatch.setattr(State, "steps_as_graph", lambda self, tokens: False)
        return made(base, method)

    return make


@pytest.mark.parametrize(("method", "site"), [*((method, 2) for method in METHODS), ("quest", 0)])
def test_a_row_that_fails_in_a_layer(compiled_as, texts, monkeypatch, method, site):
    compiled = compiled_as(method)
    states = [compiled.prefill(ids) for ids in texts]
    steps(compiled, states, 2)
    expected = steps(compiled, [state.fork() for state in states], 6)
    with monkeypatch.context() as patch:
        failing(patch, states[1], site)
        ids = greedy(states)
        with pytest.raises(StepError, match=r"1 rows of a step failed \(row 1: no room for it\)") as caught:
            compiled.step(states, ids)
    assert list(caught.value.errors) == [1]
    assert isinstance(caught.value.errors[1], CapacityError)
    assert not caught.value.logits[1].any()
    others = [states[0], states[2]]
    assert torch.equal(caught.value.logits[[0, 2]], torch.cat([state.logits for state in others]))
    told = torch.cat([ids[None, [0, 2]], steps(compiled, others, 5)])
    assert torch.equal(told, expected[:, [0, 2]])
    with pytest.raises(StepError, match=r"row 1: a step of this state did not come to its end"):
        compiled.step(states, greedy(states))
    compiled.release(states[1])
    assert [state.lengths[0] - n for state, n in zip(others, LENGTHS[0::2])] == [9, 9]


def test_all_rows_may_fail(base, texts, monkeypatch):
    compiled = made(base, "quest")
    state = compiled.prefill(texts[0])
    failing(monkeypatch, state, 1, OSError("no space left on device"))
    with pytest.raises(StepError, match="row 0: no space left on device"):
        compiled.step([state], torch.tensor([5]))


def test_an_interruption_is_not_a_rows_failure(base, texts, monkeypatch):
    compiled = made(base, "quest")
    states = [compiled.prefill(ids) for ids in texts]
    failing(monkeypatch, states[1], 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        compiled.step(states, torch.tensor([5, 6, 7]))


def test_what_is_refused_before_the_step_leaves_its_row_as_it_was(base, texts):
    compiled = made(base, "quest")
    states = [compiled.prefill(ids) for ids in texts]
    vocabulary = compiled.program.vocab_size
    with pytest.raises(StepError, match=rf"row 2: input ids reach from {vocabulary} to {vocabulary}") as caught:
        compiled.step(states, torch.tensor([5, 6, vocabulary]))
    assert isinstance(caught.value.errors[2], InputError)
    assert [state.lengths[0] - n for state, n in zip(states, LENGTHS)] == [1, 1, 0]
    again = compiled.step([states[2]], torch.tensor([7]))
    torch.testing.assert_close(again, compiled.extend(compiled.prefill(texts[2]), torch.tensor([[7]]))[:, 0])


def test_a_row_at_the_end_of_the_context():
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    compiled = semkv.compile(LlamaForCausalLM(config).eval(), method="full")
    ids = torch.randint(3, 60, (1, 128), generator=torch.Generator().manual_seed(1))
    states = [compiled.prefill(ids), compiled.prefill(ids[:, :40])]
    with pytest.raises(StepError, match="row 0: 129 tokens do not fit the model's context of 128"):
        compiled.step(states, torch.tensor([5, 6]))
    assert [state.lengths[0] for state in states] == [128, 41]


def test_a_state_of_several_rows_fails_with_one_of_them(base, texts, monkeypatch):
    compiled = made(base, "quest")
    two = compiled.prefill(torch.cat([texts[0][:, :250], texts[1][:, :250]]))
    one = compiled.prefill(texts[2])
    failing(monkeypatch, two, 1)
    with pytest.raises(StepError) as caught:
        compiled.step([two, one], torch.tensor([5, 6, 7]))
    assert sorted(caught.value.errors) == [0, 1]
    assert one.lengths == [LENGTHS[2] + 1]
    with pytest.raises(StateError):
        two.fork()


def test_the_error_crosses_processes():
    error = pickle.loads(pickle.dumps(StepError({3: CapacityError("full")}, torch.zeros(4, 5))))
    assert isinstance(error, StepError)
    assert "row 3: full" in str(error)
    assert error.logits is None


def test_programs_that_run_a_row_at_a_time(base, texts, monkeypatch):
    compiled = made(base, "quest")
    expected = steps(compiled, [compiled.prefill(ids) for ids in texts], 4)
    states = [compiled.prefill(ids) for ids in texts]
    monkeypatch.setitem(compiled.program.__dict__, "batched", False)
    steps(compiled, states, 1)
    with monkeypatch.context() as patch:
        failing(patch, states[0], 1)
        with pytest.raises(StepError) as caught:
            compiled.step(states, expected[1])
    assert list(caught.value.errors) == [0]
    assert torch.equal(steps(compiled, states[1:], 2), expected[2:, 1:])


# -- release -----------------------------------------------------------------------------------------------------------


def test_a_released_state_is_refused_by_all(base, texts, tmp_path):
    compiled = made(base, "sekv")
    state = compiled.prefill(texts[0])
    copy = state.fork()
    compiled.release(state)
    state.release()  # again
    assert state.rows == []
    assert state.nbytes["device"] == state.nbytes["host"] == 0
    one = torch.tensor([[5]])
    for use in (
        lambda: compiled.extend(state, one),
        lambda: compiled(one, past_key_values=state),
        lambda: compiled.generate(one, state=state, max_new_tokens=1),
        lambda: compiled.step([state, copy], torch.tensor([5])),
        lambda: state.save(tmp_path / "state"),
        lambda: state.reserve(3),
        state.fork,
    ):
        with pytest.raises(StateError, match="was released, its memory is gone"):
            use()
    assert copy.lengths == [LENGTHS[0]]
    compiled.extend(copy, one)
    with pytest.raises(InputError, match="release takes a State or a Prompt, got str"):
        compiled.release("state")


@pytest.mark.parametrize("method", METHODS)
def test_memory_is_back_where_it_was(base, texts, method):
    """Though somebody holds the state still, nothing of its rows lives on: not in graphs of steps either."""
    compiled = made(base, method)
    states = [compiled.prefill(ids) for ids in texts]
    steps(compiled, states, 3)
    steps(compiled, states[:1], 1)
    held = [weakref.ref(x) for state in states for row in state.rows for x in (row, *row.memories())]
    for state in states:
        compiled.release(state)
    gc.collect()
    assert [ref() for ref in held if ref() is not None] == []


def test_host_memory_that_was_counted_is_free_again(base, texts):
    config = semkv.CompileConfig(floor=0, offload="budget", host_memory="8MB")
    compiled = base.with_method("quest", 0.3, config=config)
    tier = compiled.placement.tier
    prompt = compiled.begin()
    prompt.feed(texts[0])
    assert tier._used > 0
    compiled.release(prompt)
    del prompt
    gc.collect()
    assert tier._used == 0
    states = [compiled.prefill(ids) for ids in texts]
    steps(compiled, states, 3)
    assert tier._used > 0
    for state in states:
        compiled.release(state)
    gc.collect()
    assert tier._used == 0
