"""A step that does not come to its end: the state says so, copies made before go on, and what failed before the step loses nothing."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.stopping_criteria import StoppingCriteria

from semkv.errors import StateError
from semkv.runtime.row_memory import RowMemory
from semkv.runtime.state import State

PROMPT, STEPS = 120, 5
SETTINGS = {
    "full": ("full", None, {}),
    "streaming_llm": ("streaming_llm", 0.4, {}),
    "sekv": ("sekv", 0.5, {}),
    "quest": ("quest", 0.5, {"options": {"page": 4}}),
}


@pytest.fixture(params=list(SETTINGS))
def compiled(request, wide_program, compile_as):
    method, budget, config = SETTINGS[request.param]
    return compile_as(wide_program, method, budget, **config)


@pytest.fixture
def full(wide_program, compile_as):
    return compile_as(wide_program, "full")


@pytest.fixture
def ids():
    return torch.randint(0, 61, (2, PROMPT), generator=torch.Generator().manual_seed(0))


def decode(compiled, state, steps: int = STEPS) -> list[torch.Tensor]:
    """Logits of greedy steps."""
    return [compiled.extend(state, state.logits.argmax(-1, keepdim=True)) for _ in range(steps)]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def failing(monkeypatch):
    """`failing(site, cause)`: memories fail in that layer."""
    entries, admit = RowMemory.entries, RowMemory.admit

    def fail(at: int, cause: BaseException) -> None:
        def answer(row, site, *arguments):
            if site.index == at:
                raise cause
            return entries(row, site, *arguments)

        def enter(row, store, *arguments):
            if store.index == at:
                raise cause
            return admit(row, store, *arguments)

        monkeypatch.setattr(RowMemory, "entries", answer)
        monkeypatch.setattr(RowMemory, "admit", enter)

    yield fail
    monkeypatch.undo()


@pytest.mark.parametrize("cause", [OSError("no space left"), KeyboardInterrupt()])
def test_a_step_that_fails_in_a_layer_ends_the_state_but_not_its_copies(
    compiled, ids, failing, monkeypatch, tmp_path, cause
):
    state = compiled.prefill(ids)
    before = state.fork()
    expected = decode(compiled, before.fork())
    failing(1, cause)
    with pytest.raises(type(cause)):
        decode(compiled, state)
    monkeypatch.undo()
    for attempt in (
        lambda: decode(compiled, state),
        lambda: compiled.generate(ids[:, :1], state=state, max_new_tokens=2),
        state.fork,
        lambda: state.select([1]),
        lambda: state.save(tmp_path / "state"),
    ):
        with pytest.raises(
            StateError, match=r"did not come to its end.*from a copy that was made before \(state.fork\(\)\)"
        ):
            attempt()
    assert not (tmp_path / "state").exists()
    assert equal(decode(compiled, before), expected)


def test_what_fails_before_a_step_leaves_the_unread_token(full, ids, monkeypatch):
    state, other = full.prefill(ids), full.prefill(ids)
    for one in (state, other):
        full.generate(ids[:, :2], state=one, max_new_tokens=2, do_sample=False)
    assert state.pending is not None
    with monkeypatch.context() as patch:
        patch.setattr(State, "begin_step", lambda *_: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            full.extend(state, ids[:, :3])
    assert torch.equal(state.pending, other.pending)
    assert torch.equal(full.extend(state, ids[:, :3]), full.extend(other, ids[:, :3]))
    assert state.pending is None


class Interrupts(StoppingCriteria):
    """Ctrl-C at the call with this number."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_a_token_that_was_read_is_not_read_again(full, ids):
    state, other = full.prefill(ids), full.prefill(ids)
    with pytest.raises(KeyboardInterrupt):
        full.generate(ids[:, :2], state=state, max_new_tokens=9, do_sample=False, stopping_criteria=[Interrupts(4)])
    assert state.pending is None
    full.extend(other, ids[:, :2])
    for _ in range(3):  # the fourth token was chosen, but nobody was told of it
        full.extend(other, other.logits.argmax(-1, keepdim=True))
    assert state.lengths == other.lengths
    torch.testing.assert_close(full.extend(state, ids[:, :3]), full.extend(other, ids[:, :3]), rtol=1e-5, atol=1e-5)


class EndsThenInterrupts(Interrupts):
    """The first row has ended before the interruption."""

    def __call__(self, input_ids, scores, **kwargs):
        ended = super().__call__(input_ids, scores, **kwargs)
        ended[0] = True
        return ended


def test_rows_that_no_longer_agree_on_what_is_unread_go_no_further(full, ids):
    state = full.prefill(ids)
    with pytest.raises(KeyboardInterrupt):
        full.generate(
            ids[:, :2], state=state, max_new_tokens=9, do_sample=False, stopping_criteria=[EndsThenInterrupts(3)]
        )
    with pytest.raises(StateError):
        full.extend(state, ids[:, :1])


def test_states_outlive_their_makers_inference_mode(compiled, ids, tmp_path):
    expected = decode(compiled, compiled.prefill(ids))
    with torch.inference_mode():
        made = compiled.prefill(ids)
        states = [made, made.fork(), made.select([0, 1])]
        made.save(tmp_path / "state")
        states.append(compiled.load_state(tmp_path / "state"))
        states.append(compiled.compress([compiled.prefill_record(row) for row in ids]))
    for state in states:
        assert equal(decode(compiled, state), expected)
    with torch.inference_mode():  # and the other way round
        assert equal(decode(compiled, compiled.prefill(ids)), expected)
