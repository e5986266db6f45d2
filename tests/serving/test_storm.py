"""Many requests at once, in random order, some given up, some that fail: no answer is wrong, and memory is back where it was."""

from __future__ import annotations

import concurrent.futures
import random
from collections import Counter

import pytest
import torch

import semkv
from semkv import bundled
from semkv.profiles.bundled.tasks import make_haystack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

REQUESTS = 200
LENGTHS = (12, 40, 90, 150, 270, 330, 410, 520)
"""Tokens of prompts that are answered; those above 256 are compressed."""
TOO_MUCH = 6000
"""Tokens of a prompt that the host has no room for, where --host-memory is 40 MB."""


@pytest.fixture(scope="module")
def small(semkv_server):
    """A server of the bundled model under a method that compresses, with 128 MB for requests."""
    words = "--method snapkv --budget 0.3 --memory 128MB --host-memory 40MB --max-model-len 8K --max-num-seqs 8"
    with semkv_server("bundled", *words.split(), "--max-num-batched-tokens", "512") as server:
        yield server


@pytest.fixture(scope="module")
def own_answer():
    """`own_answer(ids, count)`: what the compiled model generates, without any server."""
    compiled = semkv.compile(bundled.load()[0], bundled.profile(), method="snapkv", budget=0.3)

    def answer(ids, count):
        given = torch.tensor([ids])
        return compiled.generate(given, max_new_tokens=count, do_sample=False, eos_token_id=None)[
            0, len(ids) :
        ].tolist()

    return answer


@pytest.fixture(scope="module")
def prompts():
    """Ids of texts in the bundled model's language, by their length."""
    tokenizer = bundled.load()[1]
    text = tokenizer(make_haystack("dense", 12_000, seed=3).context).input_ids
    return {length: text[7 * length : 8 * length] for length in LENGTHS} | {TOO_MUCH: text[:TOO_MUCH]}


def test_two_hundred_requests(small, prompts, own_answer):
    import openai

    options = {"max_tokens": 48, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    alone = {length: small.complete(prompts[length], **options).token_ids for length in LENGTHS}
    assert len({tuple(ids) for ids in alone.values()}) > 4, "prompts that are answered alike tell nothing"
    assert alone == {length: own_answer(prompts[length], 48) for length in LENGTHS}
    before, steps = small.settled(), small.report()

    draw = random.Random(0)
    kinds = ["answered"] * 130 + ["given up"] * 40 + ["fails"] * 15 + ["unknown model"] * 8 + ["too long"] * 7
    assert len(kinds) == REQUESTS
    draw.shuffle(kinds)
    work = [(kind, draw.choice(LENGTHS), draw.randrange(1, 40)) for kind in kinds]
    wrong: list[str] = []

    def ask(kind, length, after):
        try:
            if kind == "given up":
                stream = small.client.completions.create(
                    model="served",
                    prompt=prompts[length],
                    max_tokens=200,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                for number, _ in enumerate(stream):
                    if number == after:
                        stream.close()
                        break
                return kind
            if kind == "unknown model":
                small.client.completions.create(model="none", prompt="x")
            elif kind == "too long":
                small.complete([5] * 9000)
            elif kind == "fails":
                small.complete(prompts[TOO_MUCH], **options)
            else:
                made = small.complete(prompts[length], **options).token_ids
                if made != alone[length]:
                    wrong.append(f"{length} tokens: {made}, alone {alone[length]}")
                return kind
        except openai.NotFoundError:
            return "unknown model"
        except openai.BadRequestError:
            return "too long"
        except openai.InternalServerError:
            return "fails"
        return f"{kind} did not end so"

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        ends = Counter(pool.map(lambda one: ask(*one), work))
    after = small.settled()
    shared = (after["rows"] - steps["rows"]) / (after["steps"] - steps["steps"])
    grown = after["resident"] - before["resident"]
    print(f"{dict(ends)}; {shared:.1f} requests in a step; resident memory {grown / 1e6:+.1f} MB")
    assert wrong == []
    assert ends == Counter(kinds)
    assert after["bytes"] == 0
    assert grown < 40e6
    assert small.metrics()["vllm:kv_cache_usage_perc"] == 0
    assert shared > 2


def test_preempted_requests_start_anew(semkv_server, prompts):
    """Eight requests are admitted and outgrow the memory: some are put back, read again, and answered as they are alone."""
    words = "--method full --memory 26MB --max-model-len 1K --max-num-seqs 8"
    with semkv_server("bundled", *words.split()) as server:
        options = {"max_tokens": 500, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
        asked = [prompts[length] for length in LENGTHS[:4]] * 2
        alone = [server.complete(prompt, **options).token_ids for prompt in asked[:4]] * 2
        assert server.metrics()["vllm:num_preemptions_total"] == 0
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda prompt: server.complete(prompt, **options).token_ids, asked))
        count = server.metrics()["vllm:num_preemptions_total"]
        print(f"{count:.0f} preemptions")
        assert together == alone
        assert count > 0
        assert server.settled()["bytes"] == 0
