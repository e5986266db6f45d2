"""Copies, pickles, threads, lengths and rows that fail: done right, or refused at once, and nothing that was made is lost."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StoppingCriteria

import semkv
from semkv.errors import BatchError, BudgetError, ConfigError, InputError, StateError
from semkv.model.huggingface import CACHE
from semkv.runtime.row_memory import RowMemory

NEW = {"do_sample": False, "pad_token_id": 0}


def test_a_deep_copy_of_a_state_is_a_fork(small, ids):
    state = small.prefill(ids(90, 2))
    small.generate(ids(4, 2, seed=1), state=state, max_new_tokens=3, **NEW)
    for copied in (copy.deepcopy(state), copy.deepcopy({"talk": [state]})["talk"][0]):
        assert copied.lengths == state.lengths
        assert torch.equal(copied.pending, state.pending)
        small.extend(copied, ids(6, 2, seed=2))
        assert copied.lengths != state.lengths
        assert copied.placement is state.placement


def test_copies_and_pickles_say_what_to_use_instead(full, ids):
    state = full.prefill(ids(9))
    with pytest.raises(StateError, match=r"state\.fork\(\) makes an independent one"):
        copy.copy(state)
    with pytest.raises(StateError, match=r"state\.save\(path\) writes one, compiled\.load_state\(path\) reads it"):
        pickle.dumps(state)
    with pytest.raises(ConfigError, match=r"compiled\.save\(path\) writes one, semkv\.load\(path\) reads it"):
        pickle.dumps(full)
    with pytest.raises(ConfigError, match="are not pickled"):
        torch.save({"model": full}, io.BytesIO())


def test_a_deep_copy_of_a_compiled_model_has_weights_of_its_own(model, full, ids):
    copied = copy.deepcopy(full)
    expected = full(ids(20)).logits
    torch.testing.assert_close(copied(ids(20)).logits, expected, rtol=0, atol=0)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.0)
    assert torch.equal(full(ids(20)).logits, expected)


@pytest.mark.parametrize("method", ["full", "snapkv", "quest", "sekv"])
def test_a_deep_copy_of_a_model_that_has_generated(full, ids, method):
    compiled = full if method == "full" else full.with_method(method, 100)
    before = compiled.generate(ids(200), max_new_tokens=6, **NEW)
    copied = copy.deepcopy(compiled)
    assert copied.placement.steps.program is copied.program is not compiled.program
    assert torch.equal(copied.generate(ids(200), max_new_tokens=6, **NEW), before)


def test_a_compiled_model_under_torch_compile_runs_as_it_is(full, ids):
    assert torch.equal(torch.compile(full)(ids(20)).logits, full(ids(20)).logits)


def test_rows_that_there_are_not(full, ids):
    state = full.prefill(ids(9, 2))
    with pytest.raises(InputError, match="select: row 2 of a state whose rows are 0 to 1"):
        state.select([0, 2])
    with pytest.raises(InputError, match="select: no rows"):
        state.select([])
    for wrong in (1, [0.5], ["0"], [True]):
        with pytest.raises(InputError, match="expected a list of whole numbers"):
            state.select(wrong)
    assert state.select(torch.tensor([1, 0, 0])).lengths == [9, 9, 9]


def test_what_is_no_number_of_tokens_no_record_and_no_list_of_states(full, ids):
    state = full.prefill(ids(9))
    for wrong in ("3", 2.5, -1):
        with pytest.raises(ConfigError, match="expected a number of tokens from 0 on"):
            state.reserve(wrong)
    with pytest.raises(ConfigError, match=r"request_bytes\(10\.5, prompt=None\): expected 1 <= prompt"):
        full.request_bytes(10.5)
    for wrong in (ids(9), state, [state]):
        with pytest.raises(InputError, match="compress takes a record of `prefill_record`, or a list of them, got a"):
            full.compress(wrong)
    with pytest.raises(InputError, match=r"takes a list of states, got one State: step\(\[state\], ids\)"):
        full.step(state, torch.tensor([5]))
    with pytest.raises(InputError, match=r"are a list: the states have 1 rows, so a tensor \[1\]"):
        full.step([state], [5])
    with pytest.raises(InputError, match=r"input_ids of torch\.float32: expected whole numbers"):
        full.step([state], torch.tensor([5.0]))
    assert state.lengths == [9]


def test_a_prompt_that_is_not_read_to_the_end_it_was_begun_with(full, ids):
    prompt = full.begin(10)
    prompt.feed(ids(7)[0])
    with pytest.raises(InputError, match="begun with 10 tokens and has 7: feed it the rest, or release it"):
        prompt.finish()
    prompt.feed(ids(3, seed=1)[0])
    assert prompt.finish().lengths == [10]


class Waits(StoppingCriteria):
    """Stands still in the middle of a step's end until it may go on."""

    def __init__(self) -> None:
        self.there, self.go = threading.Event(), threading.Event()

    def __call__(self, input_ids, scores, **kwargs):
        self.there.set()
        assert self.go.wait(60)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_a_state_in_two_threads_is_refused_at_once_and_goes_on(small, ids, tmp_path):
    state, alone = small.prefill(ids(90)), small.prefill(ids(90))
    waits, made = Waits(), []

    def first() -> None:
        made.append(
            small.generate(ids(4, seed=1), state=state, max_new_tokens=5, stopping_criteria=[waits], **NEW).tolist()
        )

    thread = threading.Thread(target=first)
    thread.start()
    assert waits.there.wait(60)
    attempts = (
        lambda: small.generate(ids(4, seed=2), state=state, max_new_tokens=2, **NEW),
        lambda: small.extend(state, ids(1)),
        lambda: small(ids(1), **{CACHE: state}),
        lambda: state.save(tmp_path / "state"),
        state.fork,
        lambda: state.select([0]),
        lambda: copy.deepcopy(state),
    )
    for attempt in attempts:
        with pytest.raises(StateError, match=r"another thread is using this state.*state\.fork\(\)"):
            attempt()
    assert state.nbytes["device"] > 0  # looking is allowed
    assert not (tmp_path / "state").exists()
    waits.go.set()
    thread.join()
    assert made == [small.generate(ids(4, seed=1), state=alone, max_new_tokens=5, **NEW).tolist()]
    assert torch.equal(small.extend(state, ids(2, seed=3)), small.extend(alone, ids(2, seed=3)))


def test_states_of_one_model_in_many_threads(small, ids):
    expected = [small.generate(ids(90, seed=n), max_new_tokens=8, **NEW).tolist() for n in range(4)]
    made: dict[int, list] = {}

    def run(number: int) -> None:
        made[number] = small.generate(ids(90, seed=number), max_new_tokens=8, **NEW).tolist()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [made[number] for number in range(4)] == expected


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 12},
        {"max_length": 302},
        {"generation_config": GenerationConfig(max_new_tokens=12)},
        {"generation_config": GenerationConfig(max_length=302)},
    ],
    ids=str,
)
def test_what_would_leave_the_context_is_refused_before_the_first_token(full, ids, monkeypatch, options):
    def never(*args, **kwargs):
        raise AssertionError("the prompt was read")

    monkeypatch.setattr(type(full), "_read", never)
    with pytest.raises(InputError, match="290 tokens and 12 new ones do not fit the model's context of 300"):
        full.generate(ids(290), **options)


def test_the_configuration_of_the_model_itself_is_looked_at(full, ids, monkeypatch):
    monkeypatch.setattr(full, "generation_config", GenerationConfig(max_length=302))
    with pytest.raises(InputError, match="290 tokens and 12 new ones"):
        full.generate(ids(290))


def test_padding_is_no_part_of_a_length(model, full, ids):
    """Rows that fit may come in more columns than the context has, and with padding ids of no vocabulary."""
    prompt, mask = ids(305, 2), torch.ones(2, 305, dtype=torch.int64)
    prompt[:, :30], mask[:, :30] = 999, 0
    got = full.generate(prompt, attention_mask=mask, max_new_tokens=5, **NEW)
    alone = ids(305, 2)[:, 30:]
    assert got[:, 305:].tolist() == full.generate(alone, max_new_tokens=5, **NEW)[:, 275:].tolist()
    assert (
        got[:, 305:].tolist()
        == model.generate(alone, attention_mask=torch.ones_like(alone), max_new_tokens=5, **NEW)[:, 275:].tolist()
    )


def test_where_no_length_is_asked_for_as_much_is_made_as_fits(full, ids):
    assert full.generate(ids(290), **NEW).shape == (1, 301)
    assert full.generate(ids(30), **NEW).shape == (1, 50)
    state = full.prefill(ids(290))
    assert full.generate(ids(3, seed=1), state=state, **NEW).shape == (1, 11)


def test_rows_that_cannot_be_read_lose_no_other_rows_text(small, ids):
    """Here two rows are too short for the budget, in a batch of four."""
    prompt, mask = ids(90, 4), torch.ones(4, 90, dtype=torch.int64)
    for row in (1, 3):
        prompt[row, :70], mask[row, :70] = 0, 0
    with pytest.raises(BatchError, match=r"2 rows of a batch cannot be read.*row 1: budget 0.5 leaves") as caught:
        small.generate(prompt, attention_mask=mask, max_new_tokens=6, **NEW)
    error = caught.value
    assert list(error.errors) == [1, 3]
    assert all(isinstance(one, BudgetError) for one in error.errors.values())
    alone = small.generate(ids(90, 4)[[0, 2]], max_new_tokens=6, **NEW)
    assert error.sequences[[0, 2]].tolist() == alone.tolist()
    assert error.sequences[[1, 3], :90].tolist() == prompt[[1, 3]].tolist()
    assert not bool(error.sequences[[1, 3], 90:].any())
    assert [row.tolist() for row in error.state.ids] == alone.tolist()
    with pytest.raises(BatchError) as caught:
        small.prefill(prompt, mask)
    assert caught.value.state.lengths == [90, 90]
    assert caught.value.sequences is None
    with pytest.raises(BudgetError, match=r"leaves 10\.0 tokens"):  # all of them: no batch is left
        small.prefill(prompt[[1, 3]], mask[[1, 3]])


def test_a_host_that_has_no_room_for_a_row_has_it_for_the_others_text(full, ids):
    """They are read once: the second time, there would be no room for them beside the first."""
    roomy = full.with_method("sekv", 0.5, router="coarse")
    config = semkv.CompileConfig(host_memory=roomy._host_nbytes(90) + 100)
    tight = full.with_method("sekv", 0.5, config=config, router="coarse")
    prompt, mask = torch.cat([torch.zeros(2, 200, dtype=torch.int64), ids(90, 2)], 1), torch.ones(2, 290)
    prompt[1], mask[0, :200] = ids(290)[0], 0
    with pytest.raises(BatchError, match="row 1: a prompt of 290 tokens needs") as caught:
        tight.generate(prompt, attention_mask=mask.long(), max_new_tokens=4, **NEW)
    alone = roomy.generate(ids(90, 2)[:1], max_new_tokens=4, **NEW)
    assert caught.value.sequences[0, 290:].tolist() == alone[0, 90:].tolist()
    assert caught.value.__cause__ is None


def test_errors_cross_from_one_process_to_another(small, ids):
    """As those of a pool's workers do: all classes, with what they carry, but for states."""
    prompt, mask = ids(90, 3), torch.ones(3, 90, dtype=torch.int64)
    prompt[1, :70], mask[1, :70] = 0, 0
    with pytest.raises(BatchError) as caught:
        small.generate(prompt, attention_mask=mask, max_new_tokens=6, **NEW)
    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, BatchError)
    assert str(error) == str(caught.value)
    assert error.sequences.tolist() == caught.value.sequences.tolist()
    assert str(error.errors[1]) == str(caught.value.errors[1])
    assert error.state is None
    assert caught.value.state is not None
    failed = semkv.errors.StepError({2: BudgetError("no room")}, torch.zeros(3, 5))
    again = pickle.loads(pickle.dumps(failed))
    assert (str(again), str(again.errors[2]), again.logits) == (str(failed), "no room", None)
    carrying = (BatchError, semkv.errors.StepError)
    for kind in vars(semkv.errors).values():
        if isinstance(kind, type) and issubclass(kind, semkv.errors.SemkvError) and kind not in carrying:
            again = pickle.loads(pickle.dumps(kind("why")))
            assert (type(again), str(again)) == (kind, "why")


class Fails(StoppingCriteria):
    def __init__(self, at: int, error: BaseException) -> None:
        self.left, self.error = at, error

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        if not self.left:
            raise self.error
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("error", [RuntimeError("no more"), KeyboardInterrupt()], ids=repr)
def test_what_was_made_before_an_error_is_not_lost(full, ids, error):
    whole = full.generate(ids(30, 2), max_new_tokens=9, **NEW)
    with pytest.raises(type(error)) as caught:
        full.generate(ids(30, 2), max_new_tokens=9, stopping_criteria=[Fails(5, error)], **NEW)
    assert caught.value.sequences.tolist() == whole[:, :34].tolist()


def test_an_error_at_the_first_token_carries_the_prompts(full, ids):
    with pytest.raises(KeyboardInterrupt) as caught:
        full.generate(ids(30, 2), max_new_tokens=9, stopping_criteria=[Fails(1, KeyboardInterrupt())], **NEW)
    assert caught.value.sequences.tolist() == ids(30, 2).tolist()


def test_a_compiled_model_is_no_assistant_and_takes_no_foreign_cache(model, full, ids):
    with pytest.raises(
        ConfigError, match=r"generate\(is_assistant=\.\.\.\): as an assistant it would have to take back"
    ):
        model.generate(ids(9), assistant_model=full, max_new_tokens=4)
    with pytest.raises(ConfigError, match="is a State, made by prefill, and a DynamicCache was given"):
        full.generate(ids(9), **{CACHE: DynamicCache()}, max_new_tokens=4)
    with pytest.raises(ConfigError, match="a DynamicCache was given"):
        full(ids(9), **{CACHE: DynamicCache()})


def test_prompts_that_are_the_same_are_read_once(full, ids, monkeypatch):
    read = []
    before = type(full)._read
    monkeypatch.setattr(
        type(full), "_read", lambda self, row, **options: read.append(len(row)) or before(self, row, **options)
    )
    torch.manual_seed(0)
    out = full.generate(ids(30), do_sample=True, num_return_sequences=5, max_new_tokens=4, pad_token_id=0)
    assert read == [30]
    assert len({tuple(row) for row in out.tolist()}) == 5


def test_prompts_that_differ_are_not_copied(full, ids, monkeypatch):
    """A copy of a long prompt's memory would be a second one."""

    def never(self):
        raise AssertionError("a row was copied")

    monkeypatch.setattr(RowMemory, "clone", never)
    assert full.generate(ids(30, 2), max_new_tokens=3, **NEW).shape == (2, 33)
    assert full.prefill(ids(30, 2)).lengths == [30, 30]
    with pytest.raises(AssertionError, match="a row was copied"):  # where two are the same, one is
        full.generate(ids(30).expand(2, -1), max_new_tokens=3, **NEW)
