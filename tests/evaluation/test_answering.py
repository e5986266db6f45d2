"""Written answers and likelihoods: what is generated, when it stops, and that the figures are those of the model."""

import math
from types import SimpleNamespace

import pytest
import torch

from semkv.errors import BudgetError, ConfigError
from semkv.evaluation import Grid, Variant, evaluate
from semkv.evaluation.samples import Question, Sample
from semkv.evaluation.tables import markdown
from semkv.evaluation.tasks.base import WrittenTask

FULL, HALF = Variant(method="full"), Variant(method="tail", budget=0.5)


class WriterTask(WrittenTask):
    """Contexts of counting words; the answer repeats the question's words until a stop."""

    name = "writer"
    stop = (":",)

    def __init__(self, new_tokens=6, available=None, references=("12 13",), depth=0.25, **kinds):
        self._new, self._available, self._references, self._depth = new_tokens, available, references, depth
        for key, value in kinds.items():
            setattr(self, key, value)

    @property
    def available(self):
        return self._available

    def parameters(self):
        return {"new": self._new}

    def notes(self):
        return ("a note",)

    def make(self, tokenizer, length, index, *, seed, questions):
        ids = tuple(tokenizer.convert_tokens_to_ids([str(10 + i % 90) for i in range(length)]))
        answer = tuple(tokenizer.convert_tokens_to_ids(["12", "13", "14"])) if self.kind == "likelihood" else ()
        question = Question("12", ids[2:3], "", answer, self._depth, references=self._references, new_tokens=self._new)
        return Sample(self.name, length, index, ids, (question,) * min(questions, 3))

    def score(self, prediction, question):
        words = prediction.split()
        return sum(word in words for word in question.references[0].split()) / len(question.references[0].split())


class Counter:
    """A compiled model that writes the next number, from 15 on a colon, and the end token after 40."""

    method, device = "full", torch.device("cpu")

    def __init__(self, tokenizer, sharp=20.0):
        self.tokenizer, self.sharp, self.fed = tokenizer, sharp, []
        self.program = SimpleNamespace(max_positions=500)
        self.generation_config = SimpleNamespace(eos_token_id=[tokenizer.eos_token_id])

    def logits(self, token):
        word = self.tokenizer.convert_ids_to_tokens(token)
        following = ":" if word == "15" else str(int(word) + 1) if word.isdecimal() and int(word) < 40 else None
        out = torch.zeros(1, len(self.tokenizer))
        place = self.tokenizer.eos_token_id if following is None else self.tokenizer.convert_tokens_to_ids(following)
        out[0, place] = self.sharp
        return out

    def extend(self, state, ids):
        self.fed.append(ids[0].tolist())
        state.logits = self.logits(int(ids[0, -1]))
        return state.logits[:, None]


@pytest.fixture
def answering(tokenizer):
    from semkv.evaluation.answering import Answering, Tally
    from semkv.evaluation.subject import Subject
    from semkv.evaluation.talking import talk_together

    def run(task, first="11"):
        model = Counter(tokenizer)
        state = SimpleNamespace(
            watch=None,
            logits=model.logits(tokenizer.convert_tokens_to_ids(first)),
            nbytes=dict.fromkeys(("peak", "workspace", "host", "disk", "reserved", "window"), 0),
            full_bytes=1,
            stats=SimpleNamespace(
                peak_share=0.0,
                device_share=0.0,
                attended_share=0.0,
                device_share_mean=0.0,
                attended_share_mean=0.0,
                excess_share=0.0,
                excess_share_mean=0.0,
                moved_bytes_per_step=0.0,
                steps=0,
                zoom_rate={},
            ),
        )
        tally = Tally()
        question = task.make(tokenizer, 50, 0, seed=0, questions=1).questions[0]
        talk_together(
            Subject(model, "x"), model, [Answering(tokenizer, task).answer(model, state, (), question, tally)], 1
        )
        return tally, model

    return run


def test_a_text_ends_at_a_stop_string_which_is_cut(answering):
    tally, model = answering(WriterTask(new_tokens=20))
    assert tally.answers[0].text.split() == ["12", "13", "14", "15"]
    assert tally.answers[0].score == 1.0
    assert tally.answers[0].correct
    assert len(model.fed) == len(tally.step_us) == 4


def test_a_text_ends_with_its_tokens_or_the_end_token(answering, tokenizer):
    tally, _ = answering(WriterTask(new_tokens=1))
    assert tally.answers[0].text.split() == ["12"]
    assert (tally.answers[0].score, tally.answers[0].correct) == (0.5, False)
    tally, model = answering(WriterTask(new_tokens=20), first="38")
    assert tally.answers[0].text.split() == ["39", "40"]
    assert len(model.fed) == 2


def test_a_score_that_cannot_be_lost_ends_the_text(answering):
    tally, model = answering(WriterTask(new_tokens=20, monotone=True))
    assert tally.answers[0].text.split() == ["12", "13"]
    assert len(model.fed) == 1


def test_likelihood_is_that_of_the_text_as_written(answering, tokenizer):
    tally, model = answering(WriterTask(kind="likelihood"))
    answer = tally.answers[0]
    each = math.log(math.exp(20.0) + len(tokenizer) - 1) - 20.0
    assert answer.nats == pytest.approx(3 * each)
    assert answer.token_nats == pytest.approx([each] * 3, abs=1e-5)
    assert answer.score == pytest.approx(math.exp(-each))
    assert (answer.matched, answer.expected, answer.correct) == (3, 3, True)
    assert [tokenizer.convert_ids_to_tokens(ids) for ids in model.fed] == [["12"], ["13"]]


def test_scores_make_cells_with_their_task(lookup, tokenizer):
    grid = Grid(variants=(FULL, HALF), families=("writer", "dense"), lengths=(128,), samples=5, questions_per_context=4)
    task = WriterTask(available=3, new_tokens=2)
    report = evaluate(lookup, tokenizer, grid, identity="x", tasks={"writer": task})
    found = {(c.cell.family, c.cell.variant.method): c for c in report.cells}
    assert found["writer", "full"].accuracy.samples == 3
    assert found["writer", "full"].cell.questions_per_context == 1
    assert found["writer", "full"].cell.task == {"new": 2}
    assert found["dense", "full"].accuracy.samples == 5
    assert found["dense", "full"].cell.task is None
    assert report.complete
    assert report.notes == ["a note"]
    assert "### Scores (%), 128 tokens" in markdown(report)


@pytest.mark.parametrize("depth", [0.25, None])
def test_rows_of_tasks_resume_by_cell(depth, lookup, tokenizer, tmp_path):
    grid = Grid(variants=(FULL,), families=("writer",), lengths=(128,), samples=4)
    rows = tmp_path / "rows.jsonl"
    first = evaluate(
        lookup, tokenizer, grid, identity="x", rows=rows, tasks={"writer": WriterTask(new_tokens=2, depth=depth)}
    )
    done = lookup.log["prefill"]
    assert done == 4
    again = evaluate(
        lookup, tokenizer, grid, identity="x", rows=rows, tasks={"writer": WriterTask(new_tokens=2, depth=depth)}
    )
    assert lookup.log["prefill"] == done
    assert again.cells == first.cells
    evaluate(lookup, tokenizer, grid, identity="x", rows=rows, tasks={"writer": WriterTask(new_tokens=3, depth=depth)})
    assert lookup.log["prefill"] == 2 * done


def test_likelihood_is_reported_as_perplexity_and_kept_out_of_means(lookup, tokenizer):
    from semkv.evaluation.plots import scored

    task = WriterTask(kind="likelihood", has_question=False)
    grid = Grid(variants=(FULL, HALF), families=("writer", "dense"), lengths=(128,), samples=4)
    report = evaluate(lookup, tokenizer, grid, identity="x", tasks={"writer": task})
    cell = next(c for c in report.cells if c.cell.family == "writer")
    # The lookup model knows no numbers that follow each other: every token is as likely as any other but the first.
    top = math.log(math.e + len(tokenizer) - 1)
    assert cell.perplexity.value == pytest.approx(math.exp(top), rel=1e-6)
    assert cell.accuracy.value == pytest.approx(math.exp(-top), rel=1e-6)
    assert all(s.families == ["dense"] for s in report.summaries)
    assert {c.cell.family for c in scored(report).cells} == {"dense"}
    assert "perplexity, and is in no mean" in markdown(report)
    alone = evaluate(
        lookup, tokenizer, grid.model_copy(update={"families": ("writer",)}), identity="x", tasks={"writer": task}
    )
    assert scored(alone).summaries == []


def test_what_the_full_cache_fails_at_is_in_no_mean(lookup, tokenizer):
    hard = WriterTask(new_tokens=2, references=("nothing of it",))
    grid = Grid(variants=(FULL, HALF), families=("writer", "dense"), lengths=(128,), samples=4)
    report = evaluate(lookup, tokenizer, grid, identity="x", tasks={"writer": hard})
    assert {c.cell.family for c in report.cells} == {"writer", "dense"}
    assert [s.families for s in report.summaries] == [["dense"], ["dense"]]
    assert "full cache itself scores under 20 % there: writer at 128." in markdown(report)
    alone = grid.model_copy(update={"families": ("writer",)})
    report = evaluate(lookup, tokenizer, alone, identity="x", tasks={"writer": hard})
    assert [s.families for s in report.summaries] == [["writer"], ["writer"]]
    assert "in no mean" not in markdown(report).lower()


def test_tasks_without_a_question_are_not_asked_in_sight(lookup, tokenizer):
    task = WriterTask(kind="likelihood", has_question=False)
    grid = Grid(variants=(FULL,), families=("writer",), lengths=(128,), questions=("seen",))
    with pytest.raises(ConfigError, match="task 'writer' asks no question after its context: question 'seen' means"):
        evaluate(lookup, tokenizer, grid, identity="x", tasks={"writer": task})


def test_lengths_of_tasks_count_prompt_and_answer(lookup, tokenizer):
    grid = Grid(variants=(FULL,), families=("writer",), lengths=(2049,))
    with pytest.raises(
        ConfigError, match="length 2049 for task 'writer': the model's context is 2048 tokens; prompt and"
    ):
        evaluate(lookup, tokenizer, grid, identity="x", tasks={"writer": WriterTask()})
    assert lookup.log == {"prefill": 0, "compress": 0}


def test_a_budget_that_a_short_context_breaks_names_it(lookup, tokenizer, monkeypatch):
    def refuse(self, record):
        raise BudgetError("too small")

    monkeypatch.setattr(type(lookup), "compress", refuse)
    grid = Grid(variants=(FULL,), families=("writer",), lengths=(128,))
    with pytest.raises(BudgetError, match="writer, 128 tokens, context 0: too small"):
        evaluate(lookup, tokenizer, grid, identity="x", tasks={"writer": WriterTask()})
