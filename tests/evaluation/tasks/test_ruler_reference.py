"""RULER's tasks against rows that RULER's own scripts made: structure, lengths and scoring."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from semkv.evaluation.samples import Question
from semkv.evaluation.tasks import build_tasks
from semkv.evaluation.tasks.haystacks import NOISE, hide, repeated, sentences_of, words_of
from semkv.evaluation.tasks.registry import GROUPS
from semkv.evaluation.tasks.ruler_frequent_words import rank_counts

LENGTH = 4096
NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")
NUMBERED = re.compile(r"\d+\. (\S+)")
PROSE = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")


@pytest.fixture
def rows(data):
    folder = data("bench", "ruler_ref_4096")

    def read(name):
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line]

    return read


@pytest.fixture
def sources(data):
    return {
        "haystack": str(data("corpus", "emerson_essays.txt")),
        "squad": str(data("bench", "ruler_qa", "squad.json")),
        "hotpotqa": str(data("bench", "ruler_qa", "hotpotqa.json")),
    }


@pytest.fixture
def ours(neox, sources):
    """Texts of three samples: context, question with the answer's beginning, references, tokens in all."""

    def read(name, length=LENGTH):
        task = build_tasks([name], sources=sources)[name]
        for index in range(3):
            sample = task.make(neox, length, index, seed=0, questions=1)
            question = sample.questions[0]
            yield neox.decode(sample.ids), neox.decode(question.ids), question, sample.longest

    return read


def form(text):
    """A text with everything that is drawn replaced by what kind of thing it is."""
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", "UUID", text)
    text = re.sub(r"\b\d{7}\b", "NUMBER", text)
    text = re.sub(r"(?<=for )(?!UUID)[^:]+?(?= is:)", "KEY", text)
    return re.sub(r"(?<=for )(?!UUID)\S+?(?=[ ,])|(?<=, )(?:and )?\S+?-\S+?(?=[ ,])", "KEY", text)


@pytest.mark.parametrize("name", GROUPS["ruler"])
def test_lengths_count_prompt_and_answer_as_rulers_do(name, rows, ours, neox):
    new_tokens = NEW_TOKENS[name.split("_")[0]]
    theirs = [row["length"] for row in rows(name)]
    for row in rows(name):
        assert row["length"] == len(neox(row["input"] + row["answer_prefix"])["input_ids"]) + new_tokens
    found = []
    for context, question, asked, longest in ours(name):
        assert asked.new_tokens == new_tokens
        assert longest == len(neox(context + question)["input_ids"]) + new_tokens
        found.append(longest)
    assert max(found) <= LENGTH
    # RULER steps down in coarse steps and may leave a third of the length; ours are as long as its longest, or longer.
    assert min(found) >= min(max(theirs), LENGTH - 60) or name.startswith("qa")
    assert min(found) >= LENGTH - 260


@pytest.mark.parametrize("name", [n for n in GROUPS["ruler"] if n.startswith("niah")])
def test_needle_prompts_have_rulers_wording(name, rows, ours):
    expected = set()
    for row in rows(name):
        first, _, rest = row["input"].partition("\n")
        expected.add((first, form(rest.rsplit("\n", 1)[1] + row["answer_prefix"])))
    assert len(expected) == 1
    for context, question, _, _ in ours(name):
        assert (context.split("\n", 1)[0], form(question.removeprefix("\n"))) in expected


@pytest.mark.parametrize("name", [n for n in GROUPS["ruler"] if n.startswith("niah")])
def test_needles_are_as_many_and_of_the_same_kind(name, rows, ours):
    def shape(context, outputs):
        needles = NEEDLE.findall(context)
        keys = {key for _, key, _ in needles}
        answers = [key for _, key, value in needles if value in outputs]
        among = "many" if len(needles) > 8 else (len(needles), len(keys))
        return (
            among,
            {kind for kind, _, _ in needles},
            {form(v) for _, _, v in needles},
            len(answers),
            len(set(answers)),
        )

    theirs = {repr(shape(row["input"], row["outputs"])) for row in rows(name)}
    assert len(theirs) == 1
    for context, _, asked, _ in ours(name):
        assert repr(shape(context, asked.references)) in theirs


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2", "niah_multikey_3"])
def test_haystacks_of_lines_are_lines_of_the_same_forms(name, rows, ours):
    def lines(context):
        return {form(line) for line in context.split("\n")[1:]}

    theirs = lines(rows(name)[0]["input"].rsplit("\n", 1)[0])
    for context, _, _, _ in ours(name):
        assert lines(context) == theirs


@pytest.mark.parametrize("name", PROSE)
def test_reference_haystacks_are_rebuilt_to_the_letter(name, rows, sources):
    """The rows' needles, hidden by our code where the rows have them, give the rows' text."""
    essay = words_of(Path(sources["haystack"]).read_text(encoding="utf-8"))
    for row in rows(name):
        context = row["input"].split("\n", 1)[1].rsplit("\n", 1)[0]
        needles = [match[0] for match in NEEDLE.finditer(context)]
        bare, places = context, []
        for needle in needles:
            before, after = bare.split(needle, 1)
            places.append(len(sentences_of(before.rstrip(" "))))
            bare = (before.rstrip(" ") + " " + after.lstrip(" ")).strip(" ")
        count = len(bare.split(" "))
        sentences = sentences_of(" ".join(repeated(essay, count)))
        depths = [(place + 0.5) / len(sentences) for place in places]
        assert hide(sentences, needles, depths) == context


def test_variable_tracking_has_rulers_structure(rows, ours):
    def shape(text):
        example, _, problem = text.partition("\n\nMemorize and track")
        found = []
        for part in (example, problem):
            chain = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)( ?)\n", part)
            assert [old for _, old, _ in chain[1:]] == [new for new, _, _ in chain[:-1]]
            found.append(([len(name) for name, _, _ in chain], [space for _, _, space in chain], len(chain[0][1])))
        return found, example.count(NOISE)

    def words(text):
        return re.sub(r"\b[A-Z]{5}\b|\b[A-Z]{3}\b(?<!VAR)|\d{5}", "X", text.replace(NOISE, "").replace("\n", " "))

    theirs = rows("vt")
    for (context, question, asked, _), row in zip(ours("vt"), theirs):
        assert shape(context) == shape(row["input"])
        assert len(asked.references) == len(row["outputs"]) == 5
        chain = re.findall(r"VAR (\w+) = ", context.partition("\n\nMemorize and track")[2])
        assert list(asked.references) == chain
        ending = row["input"].rsplit("\n", 1)[1] + row["answer_prefix"]
        assert words(question).split() == words(ending).split()
        assert Counter(words(context).split()) - Counter(words(row["input"]).split()) == Counter()


def test_common_words_have_rulers_counts(rows, ours):
    def shape(text):
        lists = re.findall(r"appear most often\.\n(.*?)(?:\nQuestion|$)", text, re.DOTALL)
        found = [Counter(Counter(NUMBERED.findall(part)).values()) for part in lists]
        return found[0], {times: n for times, n in found[1].items() if times == 30}, set(found[1])

    theirs = rows("cwe")
    for (context, question, asked, _), row in zip(ours("cwe"), theirs):
        assert shape(context) == shape(row["input"])
        words = Counter(NUMBERED.findall(context.rsplit("appear most often.\n", 1)[1]))
        assert {word for word, times in words.items() if times == 30} == set(asked.references)
        assert question == "\n" + row["input"].rsplit("\n", 1)[1] + row["answer_prefix"]
        solved = context.split("list are: ", 1)[1].split("\n", 1)[0]
        reference = row["input"].split("list are: ", 1)[1].split("\n", 1)[0]
        assert re.sub(r"[a-z-]+", "w", solved) == re.sub(r"[a-z-]+", "w", reference)


def test_frequent_words_follow_rulers_law(rows, ours):
    def counts(text):
        return Counter(text.split("coded words. ", 1)[1].split("\nQuestion")[0].split(" "))

    for row in rows("fwe"):
        found = sorted(counts(row["input"]).values(), reverse=True)
        assert any([c for c in rank_counts(n, 81, 2.0) if c] == found for n in range(1700, 1900))
    row = rows("fwe")[0]
    for context, question, asked, _ in ours("fwe"):
        found = counts(context)
        assert [word for word, _ in found.most_common(4)] == ["...", *asked.references]
        assert {len(word) for word in found} == {3, 6}
        ordered = sorted(found.values(), reverse=True)
        assert any([c for c in rank_counts(n, 81, 2.0) if c] == ordered for n in range(1700, 2600))
        assert question == "\n" + row["input"].rsplit("\n", 1)[1] + row["answer_prefix"]


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_questions_are_rulers_questions_in_its_order(name, rows, ours, sources):
    def documents(text):
        return re.split(r"\n\nDocument \d+:\n", "\n\n" + text.split("given documents.\n\n", 1)[1])[1:]

    for (context, question, asked, _), row in zip(ours(name), rows(name)):
        assert list(asked.references) == row["outputs"]
        theirs, last = row["input"].rsplit("\n\nAnswer the question", 1)
        ending = "\n\nAnswer the question" + last
        assert question == ending + row["answer_prefix"]
        assert context.split("Document 1:")[0] == theirs.split("Document 1:")[0]
        pool = json.loads(Path(sources["squad" if name == "qa_1" else "hotpotqa"]).read_text(encoding="utf-8"))
        known = (
            {p["context"] for d in pool["data"] for p in d["paragraphs"]}
            if name == "qa_1"
            else {f"{title}\n{''.join(lines)}" for d in pool for title, lines in d["context"]}
        )
        assert set(documents(context)) <= known
        assert set(documents(theirs)) <= known
        if name == "qa_2":
            own = {f"{title}\n{''.join(lines)}" for title, lines in pool[row["index"]]["context"]}
            assert own <= set(documents(context))
            assert own <= set(documents(theirs))


@pytest.mark.parametrize("name", GROUPS["ruler"])
def test_scores_are_rulers(name, rows, sources):
    task = build_tasks([name], sources=sources)[name]
    for row in rows(name):
        references = tuple(row["outputs"])
        question = Question("", (), "", (), None, references=references)
        assert task.score("so: " + " | ".join(references).upper() + " .", question) == 1.0
        assert task.score("nothing", question) == 0.0
        one = task.score(f"it is {references[0]}", question)
        expected = 1.0 if name.startswith("qa") else sum(r in references[0] for r in references) / len(references)
        assert one == expected
