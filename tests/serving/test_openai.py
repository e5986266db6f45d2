"""What the official client asks of a server, and that `full` answers as vLLM's own model does."""

from __future__ import annotations

import concurrent.futures
import time

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old man who",
    "def fibonacci(n):\n    ",
    "The ship sailed north and the crew counted the days. " * 60,
)
"""The last one is longer than a piece where --max-num-batched-tokens is 256."""
CLOSE = 2e-4
"""Of log probabilities in float32: other orders of sums."""


@pytest.fixture(scope="module")
def chunked(semkv_server, weights):
    """A server that reads prompts in pieces of 256 tokens."""
    with semkv_server(weights, "--memory", "1GB", "--max-model-len", "2K", "--max-num-batched-tokens", "256") as server:
        yield server


def told(choice):
    """Tokens of a completion with their log probabilities, and of its prompt."""
    prompt = [next(iter(one.values()))["logprob"] for one in choice.prompt_logprobs[1:]]
    return choice.text, choice.logprobs.tokens, choice.logprobs.token_logprobs, prompt


def test_full_is_vllms_own_model(chunked, native):
    """Text, log probabilities of what is generated and of the prompt: the same, in pieces as at once."""
    worst = 0.0
    for prompt in PROMPTS:
        options = {"max_tokens": 24, "logprobs": 1, "extra_body": {"prompt_logprobs": 0}}
        text, tokens, made, read = told(chunked.complete(prompt, **options))
        own_text, own_tokens, own_made, own_read = told(native.complete(prompt, **options))
        assert (text, tokens) == (own_text, own_tokens)
        assert len(read) == len(own_read)
        differences = [abs(a - b) for a, b in zip(made + read, own_made + own_read, strict=True)]
        worst = max(worst, *differences)
    print(f"log probabilities differ by at most {worst:.1e}")
    assert worst < CLOSE
    messages = [{"role": "user", "content": "Name three colours."}]
    chats = [
        server.client.chat.completions.create(model="served", messages=messages, max_tokens=24, temperature=0)
        for server in (chunked, native)
    ]
    assert chats[0].choices[0].message.content == chats[1].choices[0].message.content
    assert chats[0].usage == chats[1].usage


def test_chat(chunked):
    messages = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Hi"}]
    made = chunked.client.chat.completions.create(
        model="served", messages=messages, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    (choice,) = made.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert made.usage.completion_tokens <= 6
    for one in choice.logprobs.content:
        assert len(one.top_logprobs) == 2
        assert one.logprob == max(other.logprob for other in one.top_logprobs)  # greedy


def test_streaming_with_usage(chunked):
    whole = chunked.complete(PROMPTS[1])
    stream = chunked.client.completions.create(
        model="served",
        prompt=PROMPTS[1],
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces = list(stream)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.text
    assert len(pieces) > 6
    assert pieces[-1].usage.completion_tokens == 12


def test_stop(chunked):
    choice = chunked.complete("1, 2, 3, 4,", max_tokens=40, stop=[" 9"])
    assert choice.finish_reason == "stop"
    assert "9" not in choice.text
    assert choice.text.startswith(" 5, 6")


def test_several_choices_and_seeds(chunked):
    def drawn(seed):
        options = {"n": 3, "temperature": 1.0, "seed": seed, "max_tokens": 8}
        made = chunked.client.completions.create(model="served", prompt=PROMPTS[1], **options)
        return [choice.text for choice in sorted(made.choices, key=lambda one: one.index)]

    first = drawn(5)
    assert len(set(first)) > 1
    assert drawn(5) == first


def test_structured_output(chunked):
    choice = chunked.complete(
        "My favourite colour is", extra_body={"structured_outputs": {"choice": ["blue", "green"]}}
    )
    assert choice.text in ("blue", "green")


def test_refusals(chunked):
    import openai

    with pytest.raises(openai.NotFoundError, match="`other` does not exist"):
        chunked.client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048"):
        chunked.complete("word " * 3000)
    assert [one.id for one in chunked.client.models.list().data] == ["served"]


def test_a_stream_that_is_given_up_is_released(chunked):
    before = chunked.settled()
    stream = chunked.client.completions.create(
        model="served", prompt=PROMPTS[1], max_tokens=1500, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    for number, _ in enumerate(stream):
        if number == 4:
            running = chunked.report()
            stream.close()
            break
    assert running["requests"] == 1
    assert running["bytes"] > 0
    after = chunked.settled()
    assert after["bytes"] == 0
    assert after["steps"] - before["steps"] < 200, "it went on to its end"
    assert chunked.metrics()["vllm:kv_cache_usage_perc"] == 0


def test_four_ragged_requests_share_a_step(chunked):
    options = {"max_tokens": 32, "extra_body": {"ignore_eos": True}}
    alone = [chunked.complete(prompt, **options).text for prompt in PROMPTS]
    before = chunked.settled()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: chunked.complete(prompt, **options).text, PROMPTS))
    after = chunked.settled()
    steps, rows = after["steps"] - before["steps"], after["rows"] - before["rows"]
    print(f"{rows} tokens in {steps} steps")
    assert together == alone
    assert rows == 4 * 31  # the first token of each follows from its prompt
    assert rows / steps > 2, "they did not share their steps"


def test_three_processes_share_the_model(semkv_server, weights, chunked):
    """Each has one of the three KV heads: text and log probabilities are those of one process, and requests share steps."""
    options = ("--memory", "1GB", "--max-model-len", "2K", "--max-num-batched-tokens", "256")
    asked = {"max_tokens": 24, "logprobs": 1, "extra_body": {"prompt_logprobs": 0}}
    with semkv_server(weights, *options, "--tensor-parallel-size", "3") as shared:
        worst = 0.0
        for prompt in PROMPTS:
            text, tokens, made, read = told(shared.complete(prompt, **asked))
            own_text, own_tokens, own_made, own_read = told(chunked.complete(prompt, **asked))
            assert (text, tokens) == (own_text, own_tokens)
            worst = max(worst, *(abs(a - b) for a, b in zip(made + read, own_made + own_read, strict=True)))
        print(f"three processes: log probabilities differ by at most {worst:.1e}")
        assert worst < CLOSE
        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = [one.text for one in pool.map(lambda prompt: shared.complete(prompt, max_tokens=24), PROMPTS)]
        assert together == [chunked.complete(prompt, max_tokens=24).text for prompt in PROMPTS]
        reports = shared.reports()
    assert [one["requests"] for one in reports] == [0, 0, 0]
    assert len({(one["steps"], one["rows"]) for one in reports}) == 1
    assert reports[0]["rows"] > reports[0]["steps"]


def test_metrics(chunked):
    before = chunked.metrics()
    chunked.complete(PROMPTS[0], max_tokens=7, extra_body={"ignore_eos": True})
    time.sleep(1)
    after = chunked.metrics()
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 7
    assert after["vllm:request_success_total"] - before["vllm:request_success_total"] == 1
    assert after["vllm:kv_cache_usage_perc"] == 0
