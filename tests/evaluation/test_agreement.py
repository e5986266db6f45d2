"""Agreement with the full cache: against the plain computation, on a real small model, for each kind of task."""

import pytest
import torch

from semkv import bundled
from semkv import compile as compile_model
from semkv.config import CompileConfig
from semkv.errors import ConfigError
from semkv.evaluation import Grid, Variant, evaluate
from semkv.evaluation.agreement import Comparison, Told
from semkv.evaluation.samples import Question, Sample
from semkv.evaluation.store import RowStore
from semkv.evaluation.tables import markdown
from semkv.evaluation.tasks.base import WrittenTask

TOKENS = 5


class Writes(WrittenTask):
    """Facts of the bundled grammar; the answer is written freely, and right where it begins as the fact says."""

    name = "writes"
    has_question = True

    def parameters(self):
        return {}

    def make(self, tokenizer, length, index, *, seed, questions):
        from semkv.evaluation.samples import make_sample

        made = make_sample(tokenizer, "dense", length, index, seed=seed, questions=1)
        asked = made.questions[0]
        question = Question(
            asked.text, asked.ids, asked.answer_text, (), None, references=(asked.answer_text,), new_tokens=TOKENS
        )
        return Sample(self.name, length, index, made.ids, (question,))

    def score(self, prediction, question):
        return float(prediction.strip().startswith(question.references[0]))


@pytest.fixture(scope="module")
def subject():
    model, tokenizer = bundled.load()
    settings = CompileConfig(floor=0)
    return compile_model(model, bundled.profile(), method="full", config=settings), tokenizer, settings


def grid(budget=0.1, question="unseen", **changes):
    variants = (Variant(method="full"), Variant(method="streaming_llm", budget=budget))
    asked = {"families": ("writes",), "lengths": (400,), "questions": (question,), "samples": 4, "agreement": True}
    return Grid(variants=variants, **{**asked, **changes})


def logits_along(compiled, record, ids, tokens):
    """Logits before each of `tokens`, one fresh state and one call per place."""
    found = []
    for place in range(len(tokens)):
        state = compiled.compress(record)
        fed = [*ids, *tokens[:place]]
        logits = compiled.extend(state, torch.tensor([fed[: len(ids)]])) if ids else state.logits[:, None]
        for token in tokens[:place]:
            logits = compiled.extend(state, torch.tensor([[token]]))
        found.append(logits[0, -1].double().log_softmax(-1))
    return torch.stack(found)


@pytest.mark.parametrize("question", ["unseen", pytest.param("seen", marks=pytest.mark.slow)])
def test_against_the_plain_computation(subject, tmp_path, question):
    compiled, tokenizer, settings = subject
    asked = grid(question=question)
    rows = tmp_path / "rows.jsonl"
    report = evaluate(compiled, tokenizer, asked, identity="x", tasks={"writes": Writes()}, rows=rows)
    near = compiled.with_method("streaming_llm", budget=0.1, config=settings)
    kl, same, kept, free = [], [], [], []
    for index in range(asked.samples):
        sample = Writes().make(tokenizer, 400, index, seed=0, questions=1)
        asked_ids = sample.questions[0].ids
        ids, after = (sample.ids, asked_ids) if question == "unseen" else ((*sample.ids, *asked_ids), ())
        record = compiled.prefill_record(torch.tensor([ids]), surprisal=False, all_queries=False)

        def write(by, record=record, after=after):
            state = by.compress(record)
            logits = by.extend(state, torch.tensor([after]))[0, -1] if after else state.logits[0]
            told = []
            while len(told) < TOKENS and int(logits.argmax()) != tokenizer.eos_token_id:
                told.append(int(logits.argmax()))
                logits = by.extend(state, torch.tensor([told[-1:]]))[0, -1]
            return told

        told, own = write(compiled), write(near)
        theirs, mine = (logits_along(by, record, after, told) for by in (compiled, near))
        kl.append((theirs.exp() * (theirs - mine)).sum(-1))
        same.append(theirs.argmax(-1) == mine.argmax(-1))
        free.append(tokenizer.decode(own))
        right = [Writes().score(tokenizer.decode(t), sample.questions[0]) == 1 for t in (told, own)]
        kept += [right[1]] if right[0] else []
    cell = next(c for c in report.cells if c.cell.variant.method == "streaming_llm")
    found = cell.agreement
    assert found.tokens == sum(map(len, kl))
    assert found.kl.value == pytest.approx(float(torch.cat(kl).mean()), rel=1e-3, abs=1e-5)
    assert found.top1.value == pytest.approx(float(torch.cat(same).double().mean()))
    assert 0 < found.top1.value < 1
    assert found.kl.value > 0.1
    assert found.kept.value == pytest.approx(sum(kept) / len(kept))
    assert found.kept.samples == len(kept) > 0
    # What it writes by itself is not changed by what it was compared with.
    stored = RowStore(rows).rows(cell.cell.key, range(asked.samples))
    assert [row.answers[0].text for row in stored] == free
    assert next(c for c in report.cells if c.cell.variant.method == "full").agreement is None
    assert "Agreement with the full cache (%), 400 tokens" in markdown(report)


def test_a_memory_that_keeps_all_agrees(subject):
    compiled, tokenizer, _ = subject
    report = evaluate(compiled, tokenizer, grid(budget=1.0), identity="x", tasks={"writes": Writes()})
    found = report.cells[-1].agreement
    assert found.top1.value == 1.0
    assert found.kl.value < 1e-6


def test_likelihood_is_compared_on_the_text(subject):
    from semkv.evaluation.tasks import build_tasks

    compiled, tokenizer, _ = subject
    tasks = build_tasks(["perplexity"], options={"perplexity": {"tokens": 24}})
    asked = grid(families=("perplexity",), samples=2)
    found = evaluate(compiled, tokenizer, asked, identity="x", tasks=tasks).cells[-1].agreement
    assert found.tokens == 48
    assert found.kl.value > 0


def test_rows_without_it_are_measured_again(subject, tmp_path):
    compiled, tokenizer, _ = subject
    rows, seen = tmp_path / "rows.jsonl", []
    asked = grid(samples=2)
    for agree in (False, True, True):
        before = len(seen)
        report = evaluate(
            compiled,
            tokenizer,
            asked.model_copy(update={"agreement": agree}),
            identity="x",
            tasks={"writes": Writes()},
            rows=rows,
            progress=lambda *told: seen.append(told),
        )
        assert len(seen) - before == {0: 4, 4: 2, 6: 0}[before]
        assert (report.cells[-1].agreement is not None) == agree


def test_divergence_is_that_of_the_definition():
    torch.manual_seed(0)
    theirs, mine = torch.randn(2, 11, dtype=torch.float64, device="cpu")
    comparison = Comparison(Told((1,), (theirs,)))
    comparison.hear(mine)
    p, q = theirs.softmax(-1), mine.softmax(-1)
    assert comparison.kl == pytest.approx(float((p * (p / q).log()).sum()))
    assert comparison.agreed == int(p.argmax() == q.argmax())


def test_it_needs_the_full_cache():
    with pytest.raises(ConfigError, match="name `full` among the methods"):
        Grid(
            variants=(Variant(method="streaming_llm", budget=0.1),),
            families=("single",),
            lengths=(400,),
            agreement=True,
        )
