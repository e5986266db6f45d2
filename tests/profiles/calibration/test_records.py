"""Records: what a sketch is learned from beside prose."""

from __future__ import annotations

import itertools
import json
import re

import torch

from semkv.profiles.calibration import MeasureSettings, text_measure_data
from semkv.profiles.calibration.records import Records


class Letters:
    """A tokenizer of bytes."""

    bos_token_id = 1

    def __call__(self, text, **_):
        return {"input_ids": list(text.encode())}

    def decode(self, ids, **_):
        return bytes(ids).decode()


def lines(count, seed):
    return list(itertools.islice(Records(["harbour", "boat", "Ahab"], seed), count))


def test_they_are_of_many_kinds_and_never_the_same():
    made = lines(400, 3)
    assert made == lines(400, 3)
    assert made != lines(400, 4)
    assert len(set(made)) == 400
    for kind in (
        r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
        r"https://\w+\.com/\w+/[0-9a-f]{8}",
        r"\w+@\w+\.org",
        r"\d+\.\d+\.\d+\.\d+ ",
    ):
        assert sum(bool(re.search(kind, line)) for line in made) > 5, kind
    assert sum(isinstance(json.loads(line), dict) for line in made if line.startswith("{")) > 5
    words = set(re.findall(r"[a-z]{5,}", " ".join(lines(400, 5)).lower()))
    assert {"harbour"} <= words


def test_a_measurement_has_contexts_of_them_which_count_in_its_digest(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("A boat left the harbour early. " * 200)
    settings = MeasureSettings(length=200, steps=20, sketch_records=2)
    data = text_measure_data([path], Letters(), settings)
    assert [ids.shape for ids in data.records] == [(220,)] * 2
    assert not torch.equal(*data.records)
    none = text_measure_data([path], Letters(), settings.model_copy(update={"sketch_records": 0}))
    assert none.records == ()
    assert none.digest() != data.digest()
    assert [ids.tolist() for _, ids in none.measured] == [ids.tolist() for _, ids in data.measured]
