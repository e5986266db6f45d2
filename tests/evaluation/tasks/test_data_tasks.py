"""Tasks whose questions come from the user's data."""

import json

import pytest

from semkv.errors import ConfigError
from semkv.evaluation.samples import Question
from semkv.evaluation.tasks import build_tasks
from semkv.evaluation.tasks.gsm8k import final_number
from semkv.evaluation.tasks.longbench import LongBench
from semkv.evaluation.tasks.longbench_sets import DATA_SETS
from semkv.evaluation.tasks.longbench_v2 import chosen


def lines(path, rows):
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    return str(path)


def prompt_text(tokenizer, sample, place=0):
    return tokenizer.decode([*sample.ids, *sample.questions[place].ids])


@pytest.fixture
def problems(tmp_path):
    shown = [
        {"question": f"What is {i} and {i}?", "answer": f"{i}+{i}=<<{i}+{i}={2 * i}>>\n#### {2 * i}"} for i in range(40)
    ]
    asked = [{"question": f"Add {i}.", "answer": f"so\n#### 1,{i:03d}"} for i in range(7)]
    return {"gsm8k": lines(tmp_path / "test.jsonl", asked), "gsm8k_train": lines(tmp_path / "train.jsonl", shown)}


def test_many_shots_fill_the_length_and_are_shared(make, bytes_only, problems):
    sample = make("gsm8k", bytes_only, 1600, 1, questions=3, sources=problems)
    text = bytes_only.decode(sample.ids)
    assert 1500 < sample.longest <= 1600
    assert text.startswith("Question: What is ")
    assert text.endswith("\n\n")
    assert [q.text for q in sample.questions] == [f"Question: Add {i}.\nAnswer:" for i in (3, 4, 5)]
    assert [q.references for q in sample.questions] == [("1003",), ("1004",), ("1005",)]
    last = make("gsm8k", bytes_only, 1600, 2, questions=3, sources=problems)
    assert len(last.questions) == 1
    few = make("gsm8k", bytes_only, 1600, 0, sources=problems, options={"shots": 2, "new_tokens": 64})
    assert bytes_only.decode(few.ids).count("Question:") == 2


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("a 3\n#### 1,234.50", "1234.5"),
        ("she has $18.", "18"),
        ("first 4 then -7", "-7"),
        ("#### 5\nbut 6", "5"),
        ("none", None),
        ("2.00", "2"),
    ],
)
def test_final_numbers(text, number):
    assert final_number(text) == number


def test_gsm8k_of_the_benchmark(make, real, data):
    folder = data("bench", "gsm8k")
    sources = {"gsm8k": str(folder / "test_100.jsonl"), "gsm8k_train": str(folder / "train_50.jsonl")}
    task = build_tasks(["gsm8k"], sources=sources)["gsm8k"]
    assert task.available == 100
    sample = task.make(real, 4096, 0, seed=0, questions=2)
    assert [q.references for q in sample.questions] == [("18",), ("3",)]
    assert 3700 < sample.longest <= 4096
    for row in task._problems:
        wanted = row["answer"].rsplit("#### ", 1)[1].replace(",", "")
        assert task.score(row["answer"], Question("", (), "", (), None, references=(wanted,))) == 1.0


def test_templates_and_lengths_are_longbenchs(data):
    folder = data("bench", "longbench_config")
    prompts = json.loads((folder / "dataset2prompt.json").read_text(encoding="utf-8"))
    lengths = json.loads((folder / "dataset2maxlen.json").read_text(encoding="utf-8"))
    assert {name: s.before + "{context}" + s.after for name, s in DATA_SETS.items()} == prompts
    assert {name: s.new_tokens for name, s in DATA_SETS.items()} == lengths


@pytest.mark.parametrize("dataset", DATA_SETS)
def test_longbench_prompts_are_the_filled_templates(dataset, make, bytes_only, tmp_path, monkeypatch):
    monkeypatch.setattr("semkv.evaluation.tasks.longbench.chinese_words", lambda text: text.split())
    row = {"input": "in {x} put", "context": "con {y} text", "answers": ["a"], "all_classes": ["a"], "dataset": dataset}
    source = {"longbench": lines(tmp_path / f"{dataset}.jsonl", [row])}
    sample = make(f"longbench_{dataset}", bytes_only, 4000, sources=source)
    text = prompt_text(bytes_only, sample)
    data = DATA_SETS[dataset]
    assert text == data.before + row["context"] + data.after.replace("{input}", row["input"])
    assert sample.questions[0].new_tokens == data.new_tokens
    assert row["context"] in bytes_only.decode(sample.ids)


def test_long_prompts_lose_their_middle(make, bytes_only, tmp_path):
    context = "".join(chr(97 + i % 26) for i in range(5000))
    row = {"input": "what?", "context": context, "answers": ["a"], "all_classes": None}
    source = {"longbench": lines(tmp_path / "qasper.jsonl", [row])}
    sample = make("longbench_qasper", bytes_only, 3000, sources=source)
    data = DATA_SETS["qasper"]
    text = data.before + context + data.after.replace("{input}", "what?")
    limit = 3000 - data.new_tokens
    assert prompt_text(bytes_only, sample) == text[: limit // 2] + text[len(text) - (limit - limit // 2) :]
    assert sample.longest == 3000
    with pytest.raises(ConfigError, match=r"a question of .* tokens leaves no room for its context in 472 tokens"):
        make("longbench_qasper", bytes_only, 600, sources=source)


@pytest.mark.parametrize(
    ("dataset", "text", "row", "score"),
    [
        ("qasper", "The red Fox!", {"answers": ["a dog", "red fox"]}, 1.0),
        ("hotpotqa", "yes it is", {"answers": ["yes"]}, 0.5),
        ("trec", "\nCity\nCountry", {"answers": ["City"], "all_classes": ["City", "Country"]}, 1.0),
        ("trec", "City, Country", {"answers": ["City"], "all_classes": ["City", "Country"]}, 0.5),
        ("triviaqa", "Paris\nPassage: London", {"answers": ["paris"]}, 1.0),
        ("samsum", "a b\nc", {"answers": ["a b"]}, 1.0),
        ("passage_count", "7, or 8", {"answers": ["8"]}, 0.5),
        ("passage_retrieval_en", "Paragraph 12", {"answers": ["Paragraph 12"]}, 1.0),
        ("passage_retrieval_zh", "\u6bb5\u843d3", {"answers": ["\u6bb5\u843d3"]}, 1.0),
        ("lcc", "```\n// no\nx = 1", {"answers": ["x = 1"]}, 1.0),
    ],
)
def test_longbench_scores(dataset, text, row, score, make, bytes_only, tmp_path):
    row = {"input": "i", "context": "c", "all_classes": None, **row}
    task = LongBench("t", dataset=dataset)
    sample = make(
        f"longbench_{dataset}", bytes_only, 4000, sources={"longbench": lines(tmp_path / f"{dataset}.jsonl", [row])}
    )
    assert task.score(text, sample.questions[0]) == pytest.approx(score, abs=1e-6)


def test_longbench_rows_of_the_benchmarks_layout(make, real, data):
    source = {"longbench": str(data("bench", "qmsum", "qmsum_test_20.jsonl"))}
    task = build_tasks(["longbench_qmsum"], sources=source)["longbench_qmsum"]
    assert task.available == 20
    for index in range(3):
        sample = task.make(real, 4096, index, seed=0, questions=1)
        assert sample.longest <= 4096
        assert task.score(sample.questions[0].references[0], sample.questions[0]) == pytest.approx(1.0, abs=1e-6)
    wrong = build_tasks(["longbench_qasper"], sources=source)["longbench_qasper"]
    with pytest.raises(ConfigError, match="holds no row of the data set 'qasper'"):
        wrong.make(real, 4096, 0, seed=0, questions=1)


@pytest.fixture
def choices(tmp_path):
    base = {"choice_A": "one", "choice_B": "two", "choice_C": "three", "choice_D": "four", "answer": "C"}
    rows = [
        {"question": "Which?", "context": "A long text.", "difficulty": "easy", "length": "short", **base},
        {"question": "Who?", "context": "Another.", "difficulty": "hard", "length": "long", **base},
    ]
    path = tmp_path / "data.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return {"longbench_v2": str(path)}


def test_longbench_v2_prompt_and_score(make, bytes_only, choices):
    sample = make("longbench_v2", bytes_only, 2000, sources=choices)
    assert prompt_text(bytes_only, sample) == (
        "Please read the following text and answer the question below.\n\n<text>\nA long text.\n</text>\n\n"
        "What is the correct answer to this question: Which?\nChoices:\n(A) one\n(B) two\n(C) three\n(D) four\n\n"
        'Format your response as follows: "The correct answer is (insert answer here)".'
    )
    task = build_tasks(["longbench_v2"], sources=choices)["longbench_v2"]
    assert task.score("**The correct answer is (C)**", sample.questions[0]) == 1.0
    assert task.score("The correct answer is D", sample.questions[0]) == 0.0
    assert chosen("C") is None
    hard = make("longbench_v2", bytes_only, 2000, sources=choices, options={"difficulty": "hard"})
    assert "Who?" in hard.questions[0].text
    with pytest.raises(ConfigError, match="no row of difficulty 'odd' and length 'any'; expected easy or hard"):
        make("longbench_v2", bytes_only, 2000, sources=choices, options={"difficulty": "odd"})


def test_longwriter_leaves_the_rest_of_the_length_to_the_answer(make, real, data):
    source = {"longwriter": str(data("bench", "longwriter", "longbench_write_en.jsonl"))}
    task = build_tasks(["longwriter"], sources=source)["longwriter"]
    assert task.available == 60
    sample = task.make(real, 2048, 0, seed=0, questions=1)
    question = sample.questions[0]
    assert question.ids == ()
    assert question.new_tokens == 2048 - len(sample.ids)
    assert task.score("word " * 100, question) == 1.0
    assert task.score("word " * 250, question) == pytest.approx(0.5)
    assert task.score("word " * 50, question) == pytest.approx(0.5)
    assert task.score("", question) == 0.0


@pytest.mark.parametrize("name", ["qa_1", "qa_2", "nq", "gsm8k", "longbench_qasper", "longbench_v2", "longwriter"])
def test_missing_data_is_named(name, make, bytes_only):
    with pytest.raises(ConfigError, match=rf"task '{name}' needs .*: give --source \w+=FILE or a Hub name"):
        make(name, bytes_only, 4096)


def test_natural_questions_stand_among_the_passages_of_others(make, bytes_only, tmp_path):
    rows = [
        {
            "question": f"who is {i}",
            "answers": [f"name {i}", f"n{i}"],
            "gold": {"title": f"T{i}", "text": f"It is name {i}."},
        }
        for i in range(9)
    ]
    sample = make("nq", bytes_only, 700, 3, sources={"nq": lines(tmp_path / "nq.jsonl", rows)})
    text = bytes_only.decode(sample.ids)
    assert "T3\nIt is name 3." in text
    assert text.count("\nDocument ") > 3
    assert sample.questions[0].references == ("name 3", "n3")
    assert bytes_only.decode(sample.questions[0].ids).endswith("Question: who is 3 Answer:")


def test_squad_as_rows_of_the_hub_is_squad_as_json(make, bytes_only, tmp_path):
    article = {
        "title": "T",
        "paragraphs": [
            {"context": f"Text {i} holds a{i}.", "qas": [{"question": f"Q{i}?", "answers": [{"text": f"a{i}"}]}]}
            for i in range(4)
        ],
    }
    article["paragraphs"][3]["qas"] = [{"question": "no?", "answers": [], "is_impossible": True}]
    nested = tmp_path / "squad.json"
    nested.write_text(json.dumps({"version": "v2.0", "data": [article]}))
    flat = [
        {
            "title": "T",
            "context": p["context"],
            "question": q["question"],
            "answers": {"text": [a["text"] for a in q["answers"]]},
        }
        for p in article["paragraphs"]
        for q in p["qas"]
    ]
    found = [
        make("qa_1", bytes_only, 900, 2, sources={"squad": place})
        for place in (str(nested), lines(tmp_path / "squad.jsonl", flat))
    ]
    assert found[0] == found[1]
    assert found[0].questions[0].references == ("a2",)
    assert "Text 2 holds a2." in bytes_only.decode(found[0].ids)
    task = build_tasks(["qa_1"], sources={"squad": str(nested)})["qa_1"]
    assert task.available == 3
