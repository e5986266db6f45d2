"""Several prompts at once: padded on either side, finishing at different steps, with a row that cannot be read."""

from __future__ import annotations

from typing import Any

import torch
from journey import GREEDY, Desk, Result, continued, journey, refusal
from torch import Tensor
from torch.utils.data import DataLoader

import semkv
from semkv.errors import BatchError

LENGTHS = (40, 330, 700)
"""Tokens of the contexts of a batch: the first is shorter than what any budget would drop."""


def questions(desk: Desk, lengths: tuple[int, ...] = LENGTHS) -> list[tuple[str, str]]:
    """A prompt and its answer of each length."""
    stacks = [desk.haystack("single", length) for length in lengths]
    return [(stack.context + stack.questions[0].text, stack.questions[0].answer) for stack in stacks]


def one_by_one(model: Any, desk: Desk) -> Result:
    return [continued(model, desk.ids(text), 6) for text, _ in questions(desk)]


@journey("snapkv", plain=one_by_one)
def batch_padded_on_the_left(model: Any, desk: Desk) -> Result:
    desk.tokenizer.padding_side = "left"
    batch = desk.tokenizer([text for text, _ in questions(desk)], return_tensors="pt", padding=True)
    out = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=6, **GREEDY)
    return out[:, batch["input_ids"].shape[1] :].tolist()


@journey("sekv", plain=one_by_one, same=True)
def batch_padded_on_the_right(model: Any, desk: Desk) -> Result:
    desk.tokenizer.padding_side = "right"
    batch = desk.tokenizer([text for text, _ in questions(desk)], return_tensors="pt", padding=True)
    out = model.generate(**batch, max_new_tokens=6, **GREEDY)
    return out[:, batch["input_ids"].shape[1] :].tolist()


def ends(desk: Desk) -> list[int]:
    """Tokens at which rows are to end: the second word of the first answer, and the full stop."""
    return desk.ids(questions(desk)[0][1].split()[1] + " .", start=False)[0].tolist()


def second_turn(desk: Desk) -> str:
    return " . which code belongs to brass kettle ? it is"


def rows_plainly(model: Any, desk: Desk) -> Result:
    first = [continued(model, desk.ids(text), 8, eos_token_id=ends(desk)) for text, _ in questions(desk)]
    more = desk.ids(second_turn(desk), start=False)
    texts = [
        torch.cat([desk.ids(text), torch.tensor([made]), more], 1) for (text, _), made in zip(questions(desk), first)
    ]
    return [first, [continued(model, text, 4) for text in texts]]


@journey("compresskv", plain=rows_plainly)
def batch_whose_rows_end_apart_and_go_on(model: Any, desk: Desk) -> Result:
    """Rows end at other steps; each goes on from its own end in a second turn."""
    desk.tokenizer.padding_side = "left"
    batch = desk.tokenizer([text for text, _ in questions(desk)], return_tensors="pt", padding=True)
    state = model.prefill(**batch)
    width = batch["input_ids"].shape[1]
    model.generate(**batch, state=state, max_new_tokens=8, eos_token_id=ends(desk), **GREEDY)
    first = [row[start:].tolist() for row, start in zip(state.ids, batch["attention_mask"].sum(1).tolist())]
    assert width == max(batch["attention_mask"].sum(1).tolist())
    more = desk.ids(second_turn(desk), start=False).repeat(len(first), 1)
    out = model.generate(more, state=state, max_new_tokens=4, **GREEDY)
    desk.check(state)
    return [first, out[:, more.shape[1] :].tolist()]


LARGE = 2_500
HOST = 19_000_000
"""Tokens of a prompt, and bytes of a host that has no room for it."""


def bad_row_plainly(model: Any, desk: Desk) -> Result:
    return [["CapacityError"], *(continued(model, desk.ids(text), 5) for text, _ in questions(desk))]


@journey("h2o", plain=bad_row_plainly)
def batch_with_a_row_that_cannot_be_read(model: Any, desk: Desk) -> Result:
    """The others' texts come with the error."""
    tight = model.with_method(desk.method, desk.budget, config=semkv.CompileConfig(host_memory=HOST))
    texts = [text for text, _ in questions(desk)]
    texts.insert(1, desk.haystack("single", LARGE).context)
    desk.tokenizer.padding_side = "left"
    batch = desk.tokenizer(texts, return_tensors="pt", padding=True)
    error = refusal(BatchError, lambda: tight.generate(**batch, max_new_tokens=5, **GREEDY))
    assert list(error.errors) == [1]
    made = error.sequences[[0, 2, 3], batch["input_ids"].shape[1] :]
    return [[type(one).__name__ for one in error.errors.values()], *made.tolist()]


@journey("quest", same=True, draws=True)  # a `DataLoader` draws its seed
def evaluation_over_a_data_loader(model: Any, desk: Desk) -> Result:
    """Batches of a `DataLoader` whose collate function pads, exact answers counted: the same lines for both models."""
    desk.tokenizer.padding_side = "left"
    data = questions(desk, (300, 60, 420, 280, 500))

    def collate(rows: list[tuple[str, str]]) -> tuple[dict[str, Tensor], list[str]]:
        batch = desk.tokenizer([text for text, _ in rows], padding=True, return_tensors="pt")
        return dict(batch), [answer for _, answer in rows]

    right, texts = 0, []
    for batch, answers in DataLoader(data, batch_size=2, collate_fn=collate):
        out = model.generate(**batch, max_new_tokens=3, **GREEDY)
        made = desk.tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        texts += made
        right += sum(text == answer for text, answer in zip(made, answers))
    assert right == len(data)
    return texts
