"""`semkv lm-eval`: the model in lm-evaluation-harness, which may not be installed."""

from __future__ import annotations

import json
import random
import warnings
from types import SimpleNamespace

import pytest

from semkv import bundled
from semkv.errors import ConfigError
from semkv.profiles.bundled.tasks import make_haystack

CONTEXT = 700


def test_without_the_harness_it_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr("semkv.cli.lm_eval.find_spec", lambda name: None)
    result = run("lm-eval", "--tasks", "lambada_openai")
    assert result.exit_code == 2
    assert "lm-evaluation-harness is not installed: pip install 'semkv[lm-eval]'" in result.stderr


@pytest.fixture(scope="module")
def harness():
    """The module that registers the model."""
    pytest.importorskip("lm_eval", reason="semkv[lm-eval] is not installed")
    import semkv.cli.lm_eval_model as module

    return module


@pytest.fixture(scope="module")
def lm(harness):
    """The model by its arguments, as the harness makes it."""
    made = {}

    def make(**options):
        key = json.dumps(options, sort_keys=True)
        if key not in made:
            made[key] = harness.SemkvLM.create_from_arg_obj({"pretrained": "bundled", **options}, {"device": "cuda:0"})
        return made[key]

    return make


@pytest.fixture(scope="module")
def samples():
    draw, out = random.Random(0), []
    for seed in range(4):
        haystack = make_haystack("dense", CONTEXT, seed=seed, n_questions=1)
        (question,) = haystack.questions
        wrong = [" ".join(str(draw.randrange(10, 99)) for _ in question.answer.split()) for _ in range(3)]
        choices = draw.sample([question.answer, *wrong], 4)
        out.append(
            {
                "context": haystack.context + question.text.rstrip(),
                "answer": question.answer,
                "choices": choices,
                "gold": choices.index(question.answer),
                "text": haystack.context[:2500],
            }
        )
    return out


def request(*arguments):
    return SimpleNamespace(args=arguments, arguments=arguments, task_name="own")


def choices_of(samples):
    return [request(one["context"], f" {choice}") for one in samples for choice in one["choices"]]


def test_full_scores_as_hf_does(lm, samples):
    from lm_eval.models.huggingface import HFLM

    hf = HFLM(pretrained=str(bundled.folder() / "model"), dtype="float32", device="cpu", batch_size=2)
    ours = lm(method="full")
    for name, requests in (
        ("loglikelihood", [*choices_of(samples), request("", " the early trains left .")]),
        ("loglikelihood_rolling", [request(one["text"]) for one in samples[:2]]),
    ):
        found = getattr(ours, name)(requests, disable_tqdm=True)
        expected = getattr(hf, name)(requests, disable_tqdm=True)
        if name == "loglikelihood":
            assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
            found, expected = ([score for score, _ in own] for own in (found, expected))
        assert found == pytest.approx(expected, abs=5e-3)
    making = {"until": ["."], "max_gen_toks": 4, "do_sample": False}
    requests = [request(one["context"], making) for one in samples]
    assert ours.generate_until(requests, disable_tqdm=True) == hf.generate_until(requests, disable_tqdm=True)


def test_contexts_are_compressed_before_the_continuation(lm, samples):
    """A tenth of the context scores otherwise than all of it, no forward runs over both, and a context is read once."""
    small, full = lm(method="streaming_llm", budget=0.1, floor=0), lm(method="full")
    read, prefill = [], small.compiled.prefill

    def counted(ids, *rest):
        read.append(ids.shape[1])
        return prefill(ids, *rest)

    object.__setattr__(small.compiled, "prefill", counted)
    requests = choices_of(samples)
    found = small.loglikelihood(requests, disable_tqdm=True)
    whole = full.loglikelihood(requests, disable_tqdm=True)
    lengths = {len(small.tok_encode(one["context"])) for one in samples}
    assert len(read) == len(samples)
    assert set(read) == lengths
    assert max(abs(a[0] - b[0]) for a, b in zip(found, whole)) > 1.0
    with pytest.raises(ConfigError, match="never reads a compressed memory"):
        small._model_call(None)


def test_short_contexts_are_told(lm, samples):
    tenth = lm(method="snapkv", budget=0.1)
    making = {"until": ["."], "max_gen_toks": 2, "do_sample": False}
    for use in (
        lambda: tenth.loglikelihood([request("the early trains left", " .")], disable_tqdm=True),
        lambda: tenth.generate_until([request("the early trains left .", making)], disable_tqdm=True),
    ):
        with pytest.warns(
            UserWarning, match=r"1 of 1 contexts are so short that budget 0.1 holds them whole.*floor=256"
        ):
            use()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tenth.loglikelihood(choices_of(samples[:1]), disable_tqdm=True)
        lm(method="full").loglikelihood([request("the early trains left", " .")], disable_tqdm=True)


def test_what_does_not_fit_loses_its_beginning(harness):
    assert harness._fitted([1, 2, 3, 4], [5, 6], 5) == ([1, 2, 3, 4], [5, 6])
    assert harness._fitted([1, 2, 3, 4], [5, 6], 3) == ([3, 4], [5, 6])
    with pytest.raises(ConfigError, match="a continuation of 4 tokens does not fit max_length=3"):
        harness._fitted([1], [1, 2, 3, 4], 3)


def test_a_saved_model(harness, lm, samples, tmp_path):
    folder = tmp_path / "bundled.semkv"
    lm(method="snapkv", budget=0.1).compiled.save(folder)
    with pytest.raises(ConfigError, match="has no tokenizer: add tokenizer="):
        harness.SemkvLM(pretrained=str(folder))
    with pytest.raises(ConfigError, match="leave out profile= and dtype="):
        harness.SemkvLM(pretrained=str(folder), tokenizer="bundled", dtype="float16")
    saved = harness.SemkvLM(pretrained=str(folder), tokenizer="bundled")
    assert saved.get_model_info()["semkv_budget"] == 0.1
    requests = choices_of(samples[:1])
    found = saved.loglikelihood(requests, disable_tqdm=True)
    expected = lm(method="snapkv", budget=0.1).loglikelihood(requests, disable_tqdm=True)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-3)
    other = harness.SemkvLM(pretrained=str(folder), tokenizer="bundled", method="quest", budget=0.2, page=8)
    assert other.compiled.method.name == "quest"


def test_arguments_that_make_no_sense(harness):
    with pytest.raises(ConfigError, match="batch_size='auto': rows are read one at a time"):
        harness.SemkvLM(pretrained="bundled", batch_size="auto")
    with pytest.raises(ConfigError, match="wings"):
        harness.SemkvLM(pretrained="bundled", method="snapkv", budget=0.1, wings=2)


TASKS = {
    "codes_choice": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
""",
    "codes_made": """
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 3
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
""",
}


@pytest.mark.slow
def test_the_command_on_tasks_of_our_own(harness, samples, tmp_path, monkeypatch):
    """In a process of its own: a task's file, its data, the harness's table; `full` beside `hf` and a tenth."""
    import os
    import re
    import subprocess
    import sys

    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, samples)))
    for name, text in TASKS.items():
        data = (
            f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/data.jsonl\ntest_split: test\n"
        )
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}{text}{data}metadata:\n  version: 1\n")
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    scores = {}
    for model in (
        ("--model", "hf", "--model_args", f"pretrained={bundled.folder() / 'model'},dtype=float32"),
        ("--model_args", "pretrained=bundled,method=full"),
        ("--model_args", "pretrained=bundled,method=streaming_llm,budget=0.05,floor=0"),
    ):
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "semkv.cli.main",
                "lm-eval",
                *model,
                "--tasks",
                ",".join(TASKS),
                "--include_path",
                str(tmp_path),
            ],
            env={**os.environ, **offline},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert result.returncode == 0, result.stderr[-2000:]
        found = re.findall(
            r"\|(codes_\w+) *\|[^|]*\|[^|]*\|[^|]*\|(acc|exact_match) *\|[^|]*\| *([\d.]+)\|", result.stdout
        )
        scores[model[-1]] = {name: float(value) for name, _, value in found}
    hf, full, small = scores.values()
    assert hf == full
    assert sorted(full) == sorted(TASKS)
    assert small != full
