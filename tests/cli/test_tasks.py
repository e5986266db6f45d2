"""`semkv tasks`, and `semkv eval --tasks` from the command line to files."""

import json
import math

import pytest

from semkv.evaluation import Report


def test_tasks_are_listed_with_data_and_options(run):
    result = run("tasks")
    assert result.exit_code == 0, result.output + result.stderr
    for part in (
        "niah_multikey_3",
        "longbench_repobench-p",
        "gsm8k_train",
        "depths=10",
        "groups: bundled (4), ruler (13)",
    ):
        assert part in result.stdout
    some = run("tasks", "gsm8k,needles").stdout
    assert "niah_multi" in some
    assert "qa_1" not in some


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", "rulr"), "unknown task 'rulr'; there are the groups"),
        (("--tasks", ","), "--tasks ',': expected a list such as a,b,c"),
        (("--tasks", "niah", "--source", "hay"), "--source 'hay': expected KEY=FILE or KEY=HUB_NAME"),
        (("--tasks", "niah", "--source", "hay=x"), "--source hay: unknown; there are: haystack"),
        (("--tasks", "niah", "--set", "depths=3"), "--set 'depths=3': expected TASK.OPTION=VALUE"),
        (("--tasks", "niah", "--set", "niah.dept=3"), "--set niah.dept: no such option; there are: depths"),
        (("--source", "haystack=x"), "--source, --set and --chat belong to --tasks: name the tasks"),
        (("--chat",), "--source, --set and --chat belong to --tasks"),
    ],
)
def test_eval_refuses(run, arguments, message):
    result = run("eval", "--samples", "1", "--lengths", "64", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", "niah", "--lengths", "256"), "task 'niah': this tokenizer has no token for"),
        (("--tasks", "qa_1"), "task 'qa_1' needs SQuAD's questions"),
        (("--tasks", "perplexity"), "task 'perplexity': 256 tokens of 96 to predict; expected 1 to half of the length"),
        (
            ("--tasks", "perplexity", "--lengths", "1024"),
            "length 1024 for task 'perplexity': the model's context is 512",
        ),
        (("--tasks", "perplexity", "--question", "seen", "--set", "perplexity.tokens=9"), "asks no question after"),
    ],
)
def test_what_the_model_cannot_run_is_refused(run, tiny_model, arguments, message):
    result = run("eval", "--model", tiny_model, "--samples", "1", "--lengths", "96", "--methods", "full", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr.splitlines()[-1]


def test_perplexity_is_the_models_and_families_stand_beside_it(run, tiny_model, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from semkv.evaluation.tasks import build_tasks

    out = tmp_path / "out.json"
    command = (
        "eval",
        "--model",
        tiny_model,
        "--methods",
        "full,snapkv",
        "--budgets",
        "0.5",
        "--lengths",
        "128",
        "--samples",
        "2",
        "--tasks",
        "perplexity,dense",
        "--set",
        "perplexity.tokens=20",
        "--json",
        out,
        "--plot",
        tmp_path / "pictures",
    )
    result = run(*command)
    assert result.exit_code == 0, result.output + result.stderr
    assert "Scores (%), 128 tokens" in result.stdout
    assert "prose of the bundled grammar" in result.stdout
    report = Report.model_validate_json(out.read_text())
    cells = {(c.cell.family, c.cell.variant.method): c for c in report.cells}
    assert set(cells) == {(f, m) for f in ("perplexity", "dense") for m in ("full", "snapkv")}
    assert cells["perplexity", "snapkv"].device_share <= 0.5
    assert cells["perplexity", "full"].step_us.steps == 2 * 19

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    task = build_tasks(["perplexity"], options={"perplexity": {"tokens": 20}})["perplexity"]
    nats = 0.0
    for index in range(2):
        sample = task.make(tokenizer, 128, index, seed=0, questions=1)
        ids = torch.tensor([[*sample.ids, *sample.questions[0].answer]])
        assert ids.shape[1] == 128
        with torch.no_grad():
            logits = model(ids).logits[0].log_softmax(-1)
        nats -= sum(float(logits[place - 1, ids[0, place]]) for place in range(108, 128))
    assert cells["perplexity", "full"].perplexity.value == pytest.approx(math.exp(nats / 40), rel=1e-4)

    rows = (tmp_path / "out.rows.jsonl").read_text()
    assert run(*command).exit_code == 0
    assert (tmp_path / "out.rows.jsonl").read_text() == rows
    assert json.loads(out.read_text())["cells"] == report.model_dump(mode="json")["cells"]


def test_a_text_of_the_users_is_read(run, tiny_model, tmp_path):
    (tmp_path / "text.txt").write_text("the code for bright lion is 12 . " * 200)
    arguments = ("--lengths", "96", "--samples", "1", "--methods", "full", "--set", "perplexity.tokens=8")
    given = ("--tasks", "perplexity", "--source", f"text={tmp_path / 'text.txt'}")
    result = run("eval", "--model", tiny_model, *arguments, *given)
    assert result.exit_code == 0, result.output + result.stderr
    assert "prose of the bundled grammar" not in result.stdout
    (tmp_path / "text.txt").write_text("the code")
    short = run("eval", "--model", tiny_model, *arguments, *given)
    assert "the text has fewer than 96 tokens" in short.stderr
