"""Calibration text: how files become sequences, and what is said about those that cannot."""

import json

import pytest
import torch

from semkv.errors import ConfigError
from semkv.profiles.bundled.tokenizer import build_tokenizer
from semkv.profiles.calibration import CalibrationSettings, bundled_data, text_data


class Letters:
    """A tokenizer of single characters with a bos token."""

    bos_token_id = 0

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(letter) % 100 + 1 for letter in text]}


@pytest.fixture
def settings():
    return CalibrationSettings(length=128, queries=16, sequences=3, held_out=2)


def write(path, text):
    path.write_text(text)
    return path


def test_text_is_cut_into_sequences_spread_over_it(tmp_path, settings):
    text = "".join(chr(97 + i % 26) for i in range(6000))
    data = text_data([write(tmp_path / "a.txt", text)], Letters(), settings)
    assert len(data.training) == 3
    assert all(len(ids) == 144 and ids[0] == 0 for ids in data.training)
    assert [len(ids) for ids in data.held_out] == [144, 144]
    assert data.description == "plain text: a.txt"
    assert data.tokens == sum(len(ids) for ids in data.sequences)


def test_held_out_text_is_not_trained_on(tmp_path, settings):
    text = "a" * 5820 + "z" * 280
    data = text_data([write(tmp_path / "a.txt", text)], Letters(), settings)
    z = ord("z") % 100 + 1
    assert all(z in ids.tolist() for ids in data.held_out)
    assert not any(z in ids.tolist() for ids in data.training)


def test_json_lines_are_joined(tmp_path, settings):
    lines = "\n".join(json.dumps({"text": "word " * 100}) for _ in range(20)) + "\n\n"
    data = text_data([write(tmp_path / "a.jsonl", lines)], Letters(), settings)
    assert data.tokens >= 144 * 5


def test_the_digest_depends_on_every_token(tmp_path, settings):
    first = text_data([write(tmp_path / "a.txt", "abc " * 1500)], Letters(), settings)
    second = text_data([write(tmp_path / "a.txt", "abd " * 1500)], Letters(), settings)
    assert first.digest() != second.digest()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, r"none\.txt does not exist: pass a text or \.jsonl file"),
        ("a.txt", b"", r"a\.txt is empty: pass a file with running text"),
        ("a.txt", b" \n\n", r"a\.txt is empty"),
        ("a.txt", b"\xff\xfe\x00", r"a\.txt is not readable as UTF-8"),
        ("a.jsonl", b"", r"a\.jsonl is empty: no line has text in its field 'text'"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}', r"a\.jsonl, line 2: expected a JSON object with a string field"),
        ("a.jsonl", b"not json", r"a\.jsonl, line 1: expected a JSON object"),
        ("a.jsonl", b'{"text": 3}', r"a\.jsonl, line 1: the field 'text' is int, no string"),
        ("a.txt", b"too short", r"has 10 tokens, but length 128 with 16 queries needs at least 286"),
    ],
)
def test_files_that_cannot_serve_are_named(tmp_path, settings, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        text_data([path], Letters(), settings)


def test_no_file_is_an_error(settings):
    with pytest.raises(ConfigError, match="no calibration file was given: pass --data"):
        text_data([], Letters(), settings)


@pytest.mark.parametrize("with_tasks", [False, True])
def test_bundled_text_has_the_right_lengths_and_no_unknown_words(with_tasks):
    tokenizer = build_tokenizer()
    settings = CalibrationSettings(length=512, queries=32, sequences=4, held_out=1)
    data = bundled_data(tokenizer, settings, with_tasks=with_tasks)
    assert len(data.training) == 4
    for ids in data.training:
        assert len(ids) == 512 + 32
        assert ids[0] == tokenizer.bos_token_id
        assert not (ids == tokenizer.unk_token_id).any()
    assert ("with tasks" in data.description) == with_tasks
    assert data.digest() == bundled_data(tokenizer, settings, with_tasks=with_tasks).digest()


def test_task_queries_can_be_answered_from_their_context():
    """A dense haystack's questions follow it: each asked key and its value stand in the context, in one sentence."""
    tokenizer = build_tokenizer()
    settings = CalibrationSettings(length=512, queries=64, sequences=8, held_out=1)
    data = bundled_data(tokenizer, settings, with_tasks=True)
    answered = 0
    for ids in data.training:
        context, asked = tokenizer.decode(ids[:-64]), tokenizer.decode(ids[-64:])
        for question in asked.split(" . ")[:-1]:
            value = " ".join(question.split()[-3:])
            answered += f" {value} " in context
    assert answered >= 16


def test_seeds_draw_other_text():
    tokenizer = build_tokenizer()
    one = bundled_data(tokenizer, CalibrationSettings(length=128, queries=16, sequences=1, held_out=1))
    two = bundled_data(tokenizer, CalibrationSettings(length=128, queries=16, sequences=1, held_out=1, seed=1))
    assert not torch.equal(one.held_out[0], two.held_out[0])
