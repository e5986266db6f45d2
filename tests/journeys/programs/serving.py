"""Servers: streams in threads, queues of requests of very different lengths, event loops."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from journey import GREEDY, Desk, Result, continued, journey
from torch import Tensor
from transformers import TextIteratorStreamer

CLIENTS = 3


def requests(desk: Desk, tokens: int = 350) -> tuple[Tensor, list[Tensor]]:
    """A document that clients share, and the question of each."""
    haystack = desk.haystack("single", tokens, CLIENTS)
    return desk.ids(haystack.context), [desk.ids(one.text, start=False) for one in haystack.questions]


def streams_plainly(model: Any, desk: Desk) -> Result:
    haystack = desk.haystack("single", 350, CLIENTS)
    return [
        desk.tokenizer.decode(continued(model, desk.ids(haystack.context + one.text), 6), skip_special_tokens=True)
        for one in haystack.questions
    ]


@journey("sekv", plain=streams_plainly)
def streams_of_several_clients(model: Any, desk: Desk) -> Result:
    """Each client has its own state and reads its stream while a thread generates."""
    document, questions = requests(desk)
    read = model.prefill(document)
    states = [read.fork() for _ in questions]
    streamers = [
        TextIteratorStreamer(desk.tokenizer, skip_prompt=True, timeout=240, skip_special_tokens=True) for _ in states
    ]

    def serve(state: Any, question: Tensor, streamer: TextIteratorStreamer) -> None:
        try:
            model.generate(question, state=state, max_new_tokens=6, streamer=streamer, **GREEDY)
        except BaseException:
            streamer.end()  # else the client waits
            raise

    with ThreadPoolExecutor(CLIENTS) as pool:
        jobs = [pool.submit(serve, *client) for client in zip(states, questions, streamers)]
        texts = ["".join(streamer).strip() for streamer in streamers]
        for job in jobs:
            job.result()
    for state in states:
        desk.check(state)
    return texts


def prompts_of_all_lengths(desk: Desk, lengths: tuple[int, ...]) -> list[Tensor]:
    text = desk.ids(desk.haystack("single", max(lengths)).context)
    return [text[:, :length] for length in lengths]


def served(model: Any, prompts: list[Tensor], workers: int) -> Result:
    """Requests that threads take from a queue; answers in the order of the requests."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda one: continued(model, one, 5), prompts))


SHORT = (1, 640, 7, 300, 37, 2, 150, 257)
LONG = (1, 4000, 13, 2600, 255, 3, 1300, 64, 256)


@journey("snapkv", plain=lambda model, desk: [continued(model, one, 5) for one in prompts_of_all_lengths(desk, SHORT)])
def queue_of_requests(model: Any, desk: Desk) -> Result:
    return served(model, prompts_of_all_lengths(desk, SHORT), workers=3)


@journey(
    "streaming_llm",
    plain=lambda model, desk: [continued(model, one, 5) for one in prompts_of_all_lengths(desk, LONG)],
    slow=True,
)
def queue_of_requests_up_to_4k(model: Any, desk: Desk) -> Result:
    return served(model, prompts_of_all_lengths(desk, LONG), workers=4)


@journey("quest", plain=streams_plainly)
def an_asyncio_application(model: Any, desk: Desk) -> Result:
    """Handlers of an event loop that wait for threads of an executor."""
    document, questions = requests(desk)

    async def handle(pool: ThreadPoolExecutor, read: Any, question: Tensor) -> str:
        loop = asyncio.get_running_loop()
        state = await loop.run_in_executor(pool, read.fork)
        made = await loop.run_in_executor(
            pool, lambda: model.generate(question, state=state, max_new_tokens=6, **GREEDY)
        )
        return desk.text(made[0, question.shape[1] :])

    async def serve() -> list[str]:
        with ThreadPoolExecutor(2) as pool:
            read = await asyncio.get_running_loop().run_in_executor(pool, model.prefill, document)
            states = [read.fork() for _ in questions]  # one state may be forked by one thread at a time
            return await asyncio.gather(*(handle(pool, *pair) for pair in zip(states, questions)))

    return asyncio.run(serve())
