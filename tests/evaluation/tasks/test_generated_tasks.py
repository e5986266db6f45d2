"""Tasks that need no data, with a tokenizer of bytes and with real ones."""

import re
from itertools import pairwise

import pytest

from semkv.errors import ConfigError
from semkv.evaluation.samples import Question
from semkv.evaluation.tasks import build_tasks
from semkv.evaluation.tasks.haystacks import NOISE
from semkv.evaluation.tasks.registry import GROUPS
from semkv.evaluation.tasks.ruler_frequent_words import zeta

NEEDLES = ("niah", "niah_multi", "niah_single_1", "niah_single_2", "niah_multikey_2", "niah_multiquery")
ROOMY = {"cwe": 12000}  # its solved example and repeats need more bytes than the other tasks
ALL = (*GROUPS["needles"], *GROUPS["infinitebench"], *(n for n in GROUPS["ruler"] if not n.startswith("qa")))


def whole(tokenizer, sample, place=0):
    return tokenizer.decode([*sample.ids, *sample.questions[place].ids])


@pytest.mark.parametrize("name", ALL)
def test_lengths_are_met_for_any_tokenizer(name, make, bytes_only):
    for length in (ROOMY.get(name, 5000), ROOMY.get(name, 5000) + 1234):
        sample = make(name, bytes_only, length)
        assert 0.9 * length < sample.longest <= length
        question = sample.questions[0]
        text = whole(bytes_only, sample)
        assert text.endswith(question.text)
        assert all(reference in text for reference in question.references)
        if question.depth is not None:
            context = bytes_only.decode(sample.ids)
            first = min(context.index(reference) for reference in question.references)
            assert question.depth == pytest.approx(first / len(context), abs=0.06)


@pytest.mark.parametrize("name", ALL)
def test_real_tokenizers_are_filled(name, make, real):
    sample = make(name, real, 1536)
    assert 1536 - 130 < sample.longest <= 1536
    assert whole(real, sample).endswith(sample.questions[0].text)


@pytest.mark.parametrize("name", ALL)
def test_samples_depend_on_index_and_seed_alone(name, make, bytes_only):
    length = ROOMY.get(name, 5000)
    first = make(name, bytes_only, length, 3, seed=1)
    assert make(name, bytes_only, length, 3, seed=1) == first
    assert make(name, bytes_only, length, 4, seed=1).questions != first.questions
    assert make(name, bytes_only, length, 3, seed=2).questions != first.questions


@pytest.mark.parametrize("name", ALL)
def test_a_length_that_holds_nothing_is_refused(name, make, bytes_only):
    with pytest.raises(ConfigError, match=rf"length 150 for task '{name}': too short, .* ask for longer contexts"):
        make(name, bytes_only, 150)


@pytest.mark.parametrize("name", NEEDLES)
def test_a_tokenizer_without_the_words_is_told_what_to_use(name, make, tokenizer):
    with pytest.raises(ConfigError) as caught:
        make(name, tokenizer, 1024)
    text = str(caught.value)
    assert text.startswith(f"task '{name}': this tokenizer has no token for ")
    assert "single, multi, confusable, dense and perplexity, which the bundled model can express" in text


def test_passages_are_of_the_files_of_a_folder_in_turn(make, bytes_only, tmp_path):
    for name, letter in (("a", "x"), ("b", "y"), ("c", "z")):
        (tmp_path / f"{name}.txt").write_text(letter * (5000 if name == "a" else 900) + ".\n")
    task_options = {"options": {"tokens": "50"}, "sources": {"text": str(tmp_path)}}
    for index in range(6):
        sample = make("perplexity", bytes_only, 400, index, **task_options)
        assert set(bytes_only.decode(sample.ids)) - set(".\n") == {"xyz"[index % 3]}


def test_grid_depths_are_in_the_middle_of_the_pictures_bins(make, bytes_only):
    for index in (0, 3, 9, 12):
        sample = make("niah", bytes_only, 6000, index)
        question, text = sample.questions[0], bytes_only.decode(sample.ids)
        assert question.depth == pytest.approx((index % 10 + 0.5) / 10)
        assert text.index("One of the special") / len(text) == pytest.approx(question.depth, abs=0.03)


def test_needles_of_one_context_are_at_even_distances(make, bytes_only):
    sample = make("niah_multi", bytes_only, 9000, 0, options={"needles": "5", "within": "noise"})
    text = bytes_only.decode(sample.ids)
    found = [match.start() / len(text) for match in re.finditer("One of the special", text)]
    assert len(found) == 5
    assert found == pytest.approx([0.05, 0.25, 0.45, 0.65, 0.85], abs=0.05)
    assert NOISE in text


def test_an_answer_is_never_ambiguous(make, bytes_only):
    for index in range(3):
        sample = make("niah_multikey_2", bytes_only, 12000, index)
        key = re.search(r"number for (\S+) mentioned", sample.questions[0].text)[1]
        assert bytes_only.decode(sample.ids).count(f"for {key} is:") == 1


def test_pass_keys_and_number_strings_are_infinitebenchs(make, bytes_only):
    sample = make("infinitebench_passkey", bytes_only, 5000)
    text, question = bytes_only.decode(sample.ids), sample.questions[0]
    number = question.references[0]
    assert re.fullmatch(r"\d{5}", number)
    assert f"\nThe pass key is {number}. Remember it. {number} is the pass key.\n" in text
    assert question.text == "\n\nWhat is the pass key?\n\nThe pass key is"
    assert question.new_tokens == 6
    sample = make("infinitebench_number_string", bytes_only, 5000)
    number = sample.questions[0].references[0]
    assert re.fullmatch(r"\d{10}", number)
    assert any(a == b for a, b in pairwise(number))
    assert f"The sequence of digits is {number}. Remember it. {number} is the sequence" in bytes_only.decode(sample.ids)


def test_key_value_questions_share_an_object(make, bytes_only, data):
    import json

    sample = make("infinitebench_kv_retrieval", bytes_only, 9000, questions=3)
    text = bytes_only.decode(sample.ids)
    pairs = json.loads(text.split("JSON data:\n", 1)[1])
    assert len(sample.questions) == 3
    for question in sample.questions:
        assert pairs[re.search(r'Key: "(.*?)"', question.text)[1]] == question.references[0]
    rows = data("bench", "kv_retrieval", "kv_retrieval_75_keys_20.jsonl").read_text(encoding="utf-8").split("\n")
    theirs = {re.sub("[0-9a-f]", "x", part) for pair in json.loads(rows[0])["ordered_kv_records"] for part in pair}
    assert {re.sub("[0-9a-f]", "x", part) for pair in pairs.items() for part in pair} == theirs


@pytest.mark.parametrize(
    ("name", "reference", "texts"),
    [
        ("infinitebench_passkey", "12345", {" 12345.": 1.0, " is 12345 or 9": 1.0, "9, 12345": 0.0, "none": 0.0}),
        ("infinitebench_kv_retrieval", "ab-c", {'"ab-c"}': 1.0, "ab-c,x": 1.0, "ab-cd": 0.0, "": 0.0}),
        ("niah", "77", {"it is 77.": 1.0, "7 7": 0.0}),
    ],
)
def test_scores(name, reference, texts):
    task = build_tasks([name])[name]
    question = Question("", (), "", (), None, references=(reference,))
    assert {text: task.score(text, question) for text in texts} == texts


def test_common_words_come_from_the_users_list(make, bytes_only, tmp_path):
    (tmp_path / "words.txt").write_text("\n".join(f"w{i:03d}x" for i in range(300)))
    sample = make("cwe", bytes_only, 12000, sources={"words": str(tmp_path / "words.txt")})
    assert all(re.fullmatch(r"w\d{3}x", word) for word in sample.questions[0].references)
    (tmp_path / "few.txt").write_text("a b c")
    with pytest.raises(ConfigError, match="--source words: 3 different words; expected at least 50"):
        make("cwe", bytes_only, 5000, sources={"words": str(tmp_path / "few.txt")})


def test_zeta_is_riemanns():
    import math

    assert zeta(2.0) == pytest.approx(math.pi**2 / 6, rel=1e-12)
    assert zeta(1.5) == pytest.approx(2.612375348685488, rel=1e-10)


def test_a_generated_haystack_is_noted():
    task = build_tasks(["niah"])["niah"]
    assert task.notes() == ("niah: the haystack is generated prose; --source haystack=FILE takes a text of yours",)
    assert build_tasks(["niah_single_1"])["niah_single_1"].notes() == ()
