"""A state that leaves `generate` holds all that was generated, row by row, and goes on as the plain model does from the same text."""

from __future__ import annotations

import pytest
import torch
from transformers import StoppingCriteria

import semkv
from semkv.errors import ConfigError, InputError
from semkv.model.huggingface import CACHE

NEW = {"do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module", params=["full", "snapkv", "sekv"])
def compiled(full, request):
    """At half of the KV, so that what is compressed is read by what follows."""
    if request.param == "full":
        return full
    options = {"router": "coarse"} if request.param == "sekv" else {}
    return full.with_method(request.param, 0.5, config=semkv.CompileConfig(method_options=options, floor=0))


def plain(model, text: list[int], new: int, **options) -> list[int]:
    """What the model itself makes of a row's text."""
    prompt = torch.tensor([text])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, **(NEW | options))
    return out[0, len(text) :].tolist()


class StopsAt(StoppingCriteria):
    """Ends a row at any of these tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.tokens)


def test_turns_over_a_returned_state_are_those_of_the_plain_model(model, full, ids):
    """The idiom of transformers: the output's cache goes into the next call."""
    text, state = ids(30)[0].tolist(), None
    turn = text
    for number in range(5):
        out = full.generate(
            torch.tensor([turn]), **{CACHE: state}, max_new_tokens=6, return_dict_in_generate=True, **NEW
        )
        made = plain(model, text, 6)
        assert out.sequences[0, len(turn) :].tolist() == made
        state = out[CACHE]
        text = text + made
        assert state.ids[0].tolist() == text
        assert state.pending.tolist() == [[text[-1]]]
        turn = ids(4, seed=number + 1)[0].tolist()
        text = text + turn


def test_a_returned_state_goes_on_as_one_that_was_kept(compiled, ids):
    """Of a method that compresses, too: returned by `generate` or given to it, it is the same state."""
    kept = compiled.prefill(ids(90))
    first = compiled.generate(ids(90), state=kept, max_new_tokens=7, **NEW)
    out = compiled.generate(ids(90), max_new_tokens=7, return_dict_in_generate=True, **NEW)
    assert out.sequences.tolist() == first.tolist()
    assert kept.lengths == out[CACHE].lengths == [96]
    for state in (kept, out[CACHE]):
        assert state.ids[0].tolist() == first[0].tolist()
    again = [compiled.generate(ids(5, seed=2), state=state, max_new_tokens=7, **NEW) for state in (kept, out[CACHE])]
    assert again[0].tolist() == again[1].tolist()


def test_rows_of_a_returned_batch_end_where_they_end(model, full, ids):
    """Padded prompts, and an end-of-text token at another step in each row."""
    prompt, mask = ids(40, 3), torch.ones(3, 40, dtype=torch.int64)
    for row, padding in enumerate((0, 11, 23)):
        prompt[row, :padding], mask[row, :padding] = 0, 0
    texts = [row[real.bool()].tolist() for row, real in zip(prompt, mask)]
    free = [plain(model, text, 12) for text in texts]
    stop = next(token for token in free[0][1:6] if token not in free[1][:4])
    out = full.generate(
        prompt, attention_mask=mask, max_new_tokens=12, eos_token_id=stop, return_dict_in_generate=True, **NEW
    )
    expected = [made[: made.index(stop) + 1] if stop in made else made for made in free]
    assert len({len(made) for made in expected}) > 1
    state = out[CACHE]
    assert [row.tolist() for row in state.ids] == [text + made for text, made in zip(texts, expected)]
    assert state.pending[:, 0].tolist() == [made[-1] for made in expected]
    more = ids(3, 3, seed=5)
    second = full.generate(more, state=state, max_new_tokens=5, **NEW)
    for row in range(3):
        assert second[row, 3:].tolist() == plain(model, texts[row] + expected[row] + more[row].tolist(), 5)


def test_the_state_of_several_samples_has_a_row_for_each(full, ids):
    torch.manual_seed(3)
    options = {"do_sample": True, "temperature": 1.5, "num_return_sequences": 3, "return_dict_in_generate": True}
    out = full.generate(ids(25, 2), max_new_tokens=6, pad_token_id=0, **options)
    assert out.sequences.shape == (6, 31)
    assert len({tuple(row) for row in out.sequences.tolist()}) == 6
    assert [row.tolist() for row in out[CACHE].ids] == out.sequences.tolist()


@pytest.mark.parametrize("several", [1, 2])
def test_the_state_of_beams_is_that_of_the_sequences_they_chose(model, full, compiled, ids, several):
    options = {"num_beams": 4, "num_return_sequences": several, "length_penalty": 0.3, "max_new_tokens": 8, **NEW}
    stop = plain(model, ids(90, 2)[0].tolist(), 8)[3]
    options |= {"eos_token_id": stop, "return_dict_in_generate": True}
    out = compiled.generate(ids(90, 2), **options)
    if compiled is full:
        asked = {**options, "attention_mask": torch.ones(2, 90, dtype=torch.int64)}
        assert out.sequences.tolist() == model.generate(ids(90, 2), **asked).sequences.tolist()
    state = out[CACHE]
    assert len(state.rows) == 2 * several
    for row, sequence in enumerate(out.sequences.tolist()):
        text = state.ids[row].tolist()
        assert text == sequence[: len(text)]
        assert set(sequence[len(text) :]) <= {0, stop}
        alone = compiled.prefill(ids(90, 2)[row // several : row // several + 1])
        for token in text[90:-1]:
            compiled.extend(alone, torch.tensor([[token]]))
        assert state.lengths[row] == alone.lengths[0] == len(text) - 1
        torch.testing.assert_close(state.logits[row : row + 1], alone.logits, rtol=1e-9, atol=1e-9)
    second = compiled.generate(ids(3, 2 * several, seed=5), state=state, max_new_tokens=4, **NEW)
    assert second.shape == (2 * several, 7)


def test_stop_criteria_and_streamers_leave_a_whole_state(model, full, ids):
    free = plain(model, ids(30)[0].tolist(), 10)

    class Collect:
        tokens: list[int]

        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.tokens.append(-1)

    collected = Collect()
    out = full.generate(
        ids(30),
        max_new_tokens=10,
        stopping_criteria=[StopsAt(free[4])],
        streamer=collected,
        return_dict_in_generate=True,
        **NEW,
    )
    ends = free.index(free[4]) + 1
    assert collected.tokens == ids(30)[0].tolist() + free[:ends] + [-1]
    text = out[CACHE].ids[0].tolist()
    assert text == ids(30)[0].tolist() + free[:ends]
    assert full.generate(ids(2, seed=9), state=out[CACHE], max_new_tokens=5, **NEW)[0, 2:].tolist() == plain(
        model, text + ids(2, seed=9)[0].tolist(), 5
    )


def test_everything_again_is_read_from_where_it_is_new(model, full, ids):
    """The other idiom of transformers: all ids so far, with the state that has read them."""
    text = ids(30)
    state = full.prefill(text)
    out = full.generate(text, state=state, max_new_tokens=5, **NEW)  # nothing is new: what follows the prompt
    assert out[0, 30:].tolist() == plain(model, text[0].tolist(), 5)
    assert state.lengths == [34]
    again = torch.cat([out, ids(6, seed=4)], 1)
    out = full.generate(again, past_key_values=state, attention_mask=torch.ones_like(again), max_new_tokens=5, **NEW)
    assert out[0, 41:].tolist() == plain(model, again[0].tolist(), 5)
    assert state.lengths == [45]
    assert state.ids[0].tolist() == out[0].tolist()
    more = full.generate(out, state=state, max_new_tokens=3, **NEW)  # go on with the answer itself
    assert more[0, 46:].tolist() == plain(model, out[0].tolist(), 3)


def test_everything_again_in_a_padded_batch(model, full, ids):
    """Rows of other lengths: each has read another number of the columns."""
    rows = [ids(20, seed=1)[0].tolist(), ids(33, seed=2)[0].tolist()]

    def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, rows))
        return (
            torch.tensor([[0] * (width - len(row)) + row for row in rows]),
            torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
        )

    prompt, mask = padded(rows)
    state = full.prefill(prompt, mask)
    for turn in range(2):
        rows = [row + ids(2 + 3 * index, seed=7 + turn)[0].tolist() for index, row in enumerate(rows)]
        prompt, mask = padded(rows)
        out = full.generate(prompt, attention_mask=mask, state=state, max_new_tokens=4, **NEW)
        made = [plain(model, row, 4) for row in rows]
        assert out[:, prompt.shape[1] :].tolist() == made
        rows = [row + more for row, more in zip(rows, made)]
        assert [row.tolist() for row in state.ids] == rows


def test_new_tokens_with_the_mask_of_all(model, full, ids):
    """transformers' form of new tokens: a mask that covers what was read, too."""
    state = full.prefill(ids(30))
    mask = torch.ones(1, 34, dtype=torch.int64)
    out = full.generate(ids(4, seed=1), state=state, attention_mask=mask, max_new_tokens=4, **NEW)
    assert out[0, 4:].tolist() == plain(model, ids(30)[0].tolist() + ids(4, seed=1)[0].tolist(), 4)


def test_ids_that_begin_as_the_text_does_and_then_differ_are_refused(full, ids):
    state = full.prefill(ids(40))
    changed = torch.cat([ids(40), ids(5, seed=1)], 1)
    changed[0, 30] = (changed[0, 30] + 1 - 2) % 39 + 2
    before = state.lengths, state.logits.clone()
    for argument in ("state", CACHE):
        with pytest.raises(
            InputError,
            match="row 0: the ids share their first 30 tokens with the 40 that the state has read or made, and then differ",
        ):
            full.generate(changed, **{argument: state}, max_new_tokens=3, **NEW)
    with pytest.raises(
        InputError, match=r"share their first 25 tokens with the 40 .* and end there: pass everything again"
    ):
        full.generate(ids(40)[:, :25], state=state, max_new_tokens=3, **NEW)
    assert state.lengths == before[0]
    assert torch.equal(state.logits, before[1])
    full.extend(state, ids(40)[:, :25])  # new tokens, whatever they begin with
    assert state.lengths == [65]


def test_rows_of_both_kinds_are_refused(full, ids):
    state = full.prefill(ids(30, 2))
    both = torch.cat([ids(30, 2), ids(4, 2, seed=1)], 1)
    both[1] = ids(34, seed=8)
    with pytest.raises(InputError, match="row 1: the ids share their first"):
        full.generate(both, state=state, max_new_tokens=3, **NEW)
    assert state.lengths == [30, 30]


def test_a_short_opening_that_all_turns_share_is_no_conversation(model, full, ids):
    """Templates begin every turn with the same few tokens."""
    opening = ids(8)
    first, second = torch.cat([opening, ids(20, seed=1)], 1), torch.cat([opening, ids(25, seed=2)], 1)
    state = full.prefill(first)
    out = full.generate(second, state=state, max_new_tokens=4, **NEW)
    assert out[0, 33:].tolist() == plain(model, first[0].tolist() + second[0].tolist(), 4)


def test_two_names_for_a_state_are_refused(full, ids):
    with pytest.raises(ConfigError, match="a state was given under two names"):
        full.generate(ids(4), state=full.prefill(ids(9)), **{CACHE: full.prefill(ids(9))}, max_new_tokens=2)


def test_a_saved_state_knows_its_text(full, ids, tmp_path):
    state = full.prefill(ids(30))
    out = full.generate(ids(30), state=state, max_new_tokens=4, **NEW)
    state.save(tmp_path / "state")
    again = full.load_state(tmp_path / "state")
    assert [row.tolist() for row in again.ids] == out.tolist()
    whole = torch.cat([out, ids(3, seed=6)], 1)
    assert (
        full.generate(whole, state=again, max_new_tokens=4, **NEW).tolist()
        == full.generate(whole, state=state, max_new_tokens=4, **NEW).tolist()
    )


def test_a_loop_by_hand_is_the_plain_models(model, full, ids):
    """`forward` with the output's cache, as tutorials write it."""
    step, state, mask = ids(30, 2), None, torch.ones(2, 30, dtype=torch.int64)
    made = []
    for _ in range(6):
        out = full(step, attention_mask=mask, **{CACHE: state})
        state, step = out[CACHE], out.logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, mask[:, :1]], 1)
        made.append(step)
    for row in range(2):
        assert torch.cat(made, 1)[row].tolist() == plain(model, ids(30, 2)[row].tolist(), 6)
