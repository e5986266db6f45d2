"""A served model goes on from what an ended request left."""

from __future__ import annotations

import pytest

import semkv

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TEXT = "the late drivers loaded the trains . " * 90
QUESTIONS = ("the sailors", "the drivers said that")


def test_questions_about_a_text_that_was_sent_once(semkv_server):
    """Each is answered as over a fork of the compressed text, and the text is read once."""
    model, tokenizer = semkv.bundled.load()
    compiled = semkv.compile(model, method="quest", budget=0.25)
    text = tokenizer(TEXT, return_tensors="pt").input_ids
    state = compiled.prefill(text)
    words = "--method quest --budget 0.25 --memory 200MB --max-model-len 2K --keep-sessions 100MB"
    with semkv_server("bundled", *words.split()) as server:
        server.complete(text[0].tolist(), max_tokens=1)
        assert server.settled()["sessions"] == 1
        for number, question in enumerate(QUESTIONS, 1):
            ids = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
            out = compiled.generate(ids, state=state.fork(), max_new_tokens=8, do_sample=False)
            expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            answer = server.complete([*text[0].tolist(), *ids[0].tolist()], max_tokens=8).text
            assert answer.strip() == expected.strip()
            assert server.settled()["reused"] == number * text.shape[1]
        print(f"{len(QUESTIONS)} questions, {len(QUESTIONS) * text.shape[1]} tokens not read again")
