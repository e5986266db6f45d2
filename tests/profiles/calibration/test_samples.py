"""What the measured steps read: data sets, needle tests with the right evidence, and files that cannot serve."""

import pytest
import torch
from transformers import AutoTokenizer

from semkv.errors import ConfigError
from semkv.profiles.bundled import MODEL_DIR
from semkv.profiles.bundled.tasks import FAMILIES
from semkv.profiles.calibration import MeasureSettings, bundled_measure_data, text_measure_data
from semkv.profiles.calibration.needles import depths, lengths


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def settings():
    return MeasureSettings.checked(length=256, steps=20, samples=10, held_out=1, needle_lengths=2, needle_depths=2)


@pytest.fixture(scope="module")
def bundled(tokenizer, settings):
    return bundled_measure_data(tokenizer, settings)


def test_each_family_is_a_data_set_of_known_words(bundled, tokenizer, settings):
    assert bundled.set_names == ["prose", *FAMILIES]
    assert len(bundled.measured) == 10
    assert [name for name, _ in bundled.measured][:5] == ["prose", *FAMILIES], "data sets take turns"
    for _, ids in bundled.measured + bundled.held_out:
        assert len(ids) == settings.length + settings.steps
        assert ids[0] == tokenizer.bos_token_id
        assert not (ids == tokenizer.unk_token_id).any()
    texts = {tuple(ids.tolist()) for _, ids in bundled.measured + bundled.held_out}
    assert len(texts) == 15, "no sample is held out and measured"


def test_decode_steps_of_a_family_are_questions_with_answers(bundled, tokenizer, settings):
    for name, ids in bundled.measured:
        asked = tokenizer.decode(ids[settings.length :])
        if name == "dense":
            key = asked.split(" is ")[0].split()[-2:]
            assert " ".join(key) in tokenizer.decode(ids[: settings.length]) or "code" in asked


def test_bundled_evidence_holds_the_answer(bundled, tokenizer):
    questions = 0
    for test in bundled.needles:
        for question in test.questions:
            evidence = tokenizer.decode(test.context[list(question.evidence)]).split()
            answer = tokenizer.decode(list(question.answer)).split()
            assert [word for word in answer if word not in evidence and word not in ("reaches", "until")] == []
            assert max(question.evidence) < len(test.context)
            questions += 1
    assert questions == 2 * 2 * len(FAMILIES) * 3


def test_lengths_and_depths_are_spread():
    settings = MeasureSettings.checked(length=1000, needle_lengths=4, needle_depths=2)
    assert lengths(settings) == [250, 500, 750, 1000]
    assert depths(settings) == [0.25, 0.75]
    assert lengths(settings.model_copy(update={"length": 100})) == [64, 75, 100]


def test_the_digest_depends_on_every_part(bundled, tokenizer, settings):
    from dataclasses import replace

    assert bundled.digest() == bundled_measure_data(tokenizer, settings).digest()
    assert bundled.digest() != replace(bundled, needles=bundled.needles[1:]).digest()
    other = bundled_measure_data(tokenizer, settings.model_copy(update={"seed": 1}))
    assert other.digest() != bundled.digest()


class Words:
    """A tokenizer of whole words and of the marks behind them, with a bos token."""

    bos_token_id = 0

    def __init__(self):
        self.known = ["<bos>"]

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        ids = []
        for word in text.replace(".", " .").replace("?", " ?").split():
            if word not in self.known:
                self.known.append(word)
            ids.append(self.known.index(word))
        return {"input_ids": ids}

    def decode(self, ids):
        return " ".join(self.known[int(i)] for i in ids)


@pytest.fixture
def write(tmp_path):
    def make(name, sentence, count):
        path = tmp_path / name
        path.write_text(" ".join(sentence.format(i) for i in range(count)))
        return path

    return make


def test_long_files_are_data_sets_and_short_ones_are_joined(write, settings):
    paths = [
        write("a.txt", "Boat number {} left the harbour early.", 200),
        write("b.txt", "Nobody saw train {} arrive.", 60),
        write("c.txt", "Nobody saw bus {} arrive.", 60),
    ]
    data = text_measure_data(paths, Words(), settings)
    assert data.set_names == ["a.txt", "short files"]
    assert data.description == "plain text: a.txt, b.txt, c.txt"
    for _, ids in data.measured + data.held_out:
        assert len(ids) == 276
        assert ids[0] == 0


def test_needles_are_hidden_whole_behind_a_sentence(write, settings):
    tokenizer = Words()
    data = text_measure_data([write("a.txt", "Boat number {} left the harbour early.", 200)], tokenizer, settings)
    assert len(data.needles) == 2 * 2
    assert {len(test.context) for test in data.needles} == {128, 256}
    for test in data.needles:
        assert len(test.questions) == 3
        hidden = set()
        for question in test.questions:
            inside = list(question.evidence)
            assert inside == list(range(inside[0], inside[-1] + 1))
            assert not hidden & set(inside)
            hidden |= set(inside)
            sentence = tokenizer.decode(test.context[inside])
            assert sentence.startswith("The ")
            assert sentence.endswith(".")
            assert tokenizer.decode(question.answer) in sentence
            assert tokenizer.decode([test.context[inside[0] - 1]]) == "."
            key = sentence.split(" of the ")[1].split()[:2]
            assert " ".join(key) in tokenizer.decode(question.ids)


def test_too_short_text_is_refused(write, settings):
    with pytest.raises(ConfigError, match=r"has 12 tokens, but length 256 with 20 decode steps needs at least 550"):
        text_measure_data([write("a.txt", "One boat {}.", 3)], Words(), settings)
    with pytest.raises(ConfigError, match=r"no calibration file was given: pass --data"):
        text_measure_data([], Words(), settings)


def test_data_that_does_not_fit_the_model_is_refused(bundled):
    with pytest.raises(ConfigError, match=r"length 256 with 20 decode steps needs 276 positions, the model has 200"):
        bundled.check(10_000, 200, 256, 20)
    with pytest.raises(ConfigError, match=r"token id \d+, the model's vocabulary has 20 entries: use the model's own"):
        bundled.check(20, None, 256, 20)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_share": 0}, r"setting top_share = 0: Input should be greater than 0"),
        ({"keep": 8, "observation": 16}, r"observation = 16: these tokens are part of keep = 8"),
        ({"pool": 4}, r"setting pool = 4: expected an odd width"),
        ({"length": 64, "keep": 64}, r"setting keep = 64: a context has 64 tokens, so nothing would be dropped"),
    ],
)
def test_settings_out_of_range_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        MeasureSettings.checked(**values)


def test_the_shortest_tests_hold_their_needle(write):
    settings = MeasureSettings.checked(length=64, steps=4, needle_lengths=1, needle_depths=1, samples=1)
    data = text_measure_data([write("a.txt", "Boat number {} left.", 200)], Words(), settings)
    assert all(len(test.context) == 64 for test in data.needles)
    assert torch.is_tensor(data.needles[0].context)
