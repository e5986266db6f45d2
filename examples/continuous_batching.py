"""A small server's loop: requests come, wait until there is room, are read in pieces between the steps of others, and leave.

Every turn of the loop reads one piece of one prompt, and adds a token to each request that is past its prompt, all in one step. A request
with a token that does not exist fails alone.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import semkv
from semkv.errors import StepError
from semkv.profiles.bundled.tasks import make_haystack

PIECE, ROOM = 200, 8_000_000  # tokens of a prompt in one turn; device bytes for all requests together


def largest(logits):
    return int(logits.argmax())


@dataclass
class Request:
    name: str
    ids: torch.Tensor  # the prompt, int64 [n]
    new: int  # tokens to generate
    choose: Callable = largest  # the next token from logits [1, vocabulary]
    prompt: object = None
    state: object = None
    made: list = field(default_factory=list)

    @property
    def length(self):
        return len(self.ids) + self.new


def serve(compiled, requests):
    """Yields each request when it ends, with an error or None."""
    waiting, reading, running, taken = deque(requests), None, [], 0
    while waiting or reading or running:
        if reading is None and waiting:
            needed = compiled.request_bytes(waiting[0].length).device
            if needed > ROOM:
                yield waiting.popleft(), MemoryError(f"takes up to {needed} bytes, more than there are")
            elif taken + needed <= ROOM:  # admitted: from now on its bytes are its own
                reading, taken = waiting.popleft(), taken + needed
                reading.prompt = compiled.begin(len(reading.ids))
        if reading is not None:
            read = reading.prompt.read
            reading.prompt.feed(reading.ids[read : read + PIECE])
            if reading.prompt.read == len(reading.ids):
                reading.state, reading.prompt = reading.prompt.finish(), None
                running.append(reading)
                reading = None
        if not running:
            continue
        for request in running:
            request.made.append(request.choose(request.state.logits))
        errors = {}
        try:
            compiled.step([one.state for one in running], torch.tensor([one.made[-1] for one in running]))
        except StepError as error:
            errors = error.errors  # by row; the other rows have taken their token
        for row, request in reversed(list(enumerate(running))):
            if row in errors or len(request.made) == request.new:
                compiled.release(running.pop(row).state)
                taken -= compiled.request_bytes(request.length).device
                yield request, errors.get(row)


model, tokenizer = semkv.bundled.load()
compiled = semkv.compile(model, semkv.bundled.profile(), method="sekv", budget=0.10)
requests = [
    Request("broken", tokenizer("the early trains left .", return_tensors="pt").input_ids[0], 8, lambda logits: -1)
]
answers = {}
for seed in range(5):
    haystack = make_haystack("dense", 500 + 300 * seed, seed=seed, n_questions=1)
    (question,) = haystack.questions
    ids = tokenizer(haystack.context + question.text, return_tensors="pt").input_ids[0]
    requests.append(Request(f"user {seed}", ids, len(question.answer.split())))
    answers[f"user {seed}"] = question.answer
requests.append(Request("too long", torch.full((12_000,), 5), 8))

for request, error in serve(compiled, requests):
    if error is not None:
        print(f"{request.name}, {len(request.ids)} tokens: {error}")
    else:
        text = tokenizer.decode(request.made)
        print(f"{request.name}, {len(request.ids)} tokens: {text} (right: {answers[request.name]})")
