"""Choosing a method by measurement: elimination, ties, what cannot run, and going on after an interruption."""

from __future__ import annotations

import pytest

from semkv.errors import ConfigError
from semkv.evaluation.choice import Contest, _better, choose
from semkv.evaluation.samples import Question, Sample
from semkv.evaluation.tasks.base import Task
from semkv.profiles.schema import Choice


def test_every_method_is_measured_and_the_better_ones_longer(lookup, tokenizer, tmp_path):
    """A question is about any place of the context, so a head or a tail of half of it answers about half."""
    contest = Contest(("head", "tail"), (0.3, 0.95), ("single",), length=256, first=4, samples=16)
    seen: list[tuple[int, int]] = []
    made = choose(
        lookup,
        tokenizer,
        contest,
        identity="a",
        rows=tmp_path / "rows.jsonl",
        progress=lambda d, n, w: seen.append((d, n)),
    )
    cells = {(cell.method, cell.budget): cell for cell in made.choices}
    assert set(cells) == {(m, b) for m in ("head", "tail") for b in (0.3, 0.95)}
    assert all(cell.samples == 16 for cell in made.choices), "two methods are finalists both"
    assert cells["tail", 0.95].score > cells["tail", 0.3].score
    assert seen
    done = lookup.log["prefill"]
    again = choose(lookup, tokenizer, contest, identity="a", rows=tmp_path / "rows.jsonl")
    assert again.choices == made.choices
    assert lookup.log["prefill"] == done, "nothing is measured twice"


def test_contexts_that_are_answered_together_choose_the_same(lookup, tokenizer):
    contest = Contest(("head", "tail"), (0.3, 0.95), ("single",), length=256, first=4, samples=16)
    made = [choose(lookup, tokenizer, contest, identity="a", together=together) for together in (1, 3)]
    assert made[0] == made[1]
    assert max(lookup.log["rows"]) == 3


def test_what_cannot_run_is_left_out_with_its_reason(lookup, tokenizer):
    made = choose(
        lookup, tokenizer, Contest(("head", "absent"), (0.01, 0.5), ("single",), length=256, samples=4), identity="a"
    )
    assert {(cell.method, cell.budget) for cell in made.choices} == {("head", 0.5)}
    assert any(reason.startswith("absent at 50 %: method 'absent'") for reason in made.left_out)
    assert any(reason.startswith("head at 1 %: budget 0.01 at length 256 leaves") for reason in made.left_out)


def test_what_a_later_context_refuses_is_left_out_too(lookup, tokenizer):
    contest = Contest(("picky", "tail"), (0.5,), ("single",), length=256, first=8, samples=16)
    made = choose(lookup, tokenizer, contest, identity="a")
    assert [(cell.method, cell.samples) for cell in made.choices] == [("tail", 16)]
    assert made.left_out == ("picky at 50 %: single, 256 tokens, context 1: budget 0.5 is too small for 'picky'",)


def cell(method: str, score: float, moved: float = 0.0) -> Choice:
    return Choice(method=method, budget=0.1, length=512, score=score, samples=4, moved=moved)


def test_a_third_goes_on_three_at_least_and_ties_go_to_what_moves_less():
    many = [cell(f"m{place}", place / 20) for place in range(13)]
    assert _better(many) == ("m8", "m9", "m10", "m11", "m12")
    assert _better(many[:9]) == ("m6", "m7", "m8")
    assert _better(many[:4]) == ("m1", "m2", "m3")
    assert _better([cell("a", 1.0, 0.3), cell("b", 1.0, 0.1), cell("c", 1.0, 0.2), cell("d", 1.0, 0.0)]) == (
        "b",
        "c",
        "d",
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"methods": ()}, "no method was given"),
        ({"first": 9, "samples": 4}, "first questions 9: expected 1 to samples \\(4\\)"),
    ],
)
def test_contests_are_checked(values, message):
    with pytest.raises(ConfigError, match=message):
        Contest(**({"methods": ("head",)} | values))


class Passage(Task):
    """Likelihood of words; `lookup` finds them as likely as any."""

    name, kind, has_question = "passage", "likelihood", False

    def make(self, tokenizer, length, index, *, seed, questions):
        ids = tuple(tokenizer.convert_tokens_to_ids([str(10 + i % 90) for i in range(length)]))
        return Sample(self.name, length, index, ids, (Question("", ids[:1], "", ids[1:4], None),))


def test_text_counts_by_what_of_it_is_recovered(lookup, tokenizer, tmp_path, monkeypatch):
    """Of a method that recovers half of the gain, the score of text is a half, whatever its answers."""
    from semkv.evaluation import choice
    from semkv.evaluation.schema import Interval, Recovered

    def gain(rows, full, window):
        assert len(rows) == len(full) == len(window) == 4
        part = Interval(value=0.5, low=None, high=None, samples=4, contexts=4)
        return Recovered(every=part, far=part.model_copy(update={"value": 1.7}), tokens=12, far_tokens=3)

    monkeypatch.setattr(choice, "recovered", gain)
    monkeypatch.setattr(choice, "WINDOW", "head")
    contest = Contest(("tail",), (0.95,), ("single",), text=("passage",), length=256, first=4, samples=4)
    made = choose(lookup, tokenizer, contest, identity="a", tasks={"passage": Passage()})
    plain = choose(
        lookup, tokenizer, Contest(("tail",), (0.95,), ("single",), length=256, first=4, samples=4), identity="a"
    )
    (own,), (other,) = made.choices, plain.choices
    assert own.score == pytest.approx((other.score + (0.5 + 1.0) / 2) / 2)
