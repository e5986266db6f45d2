"""transformers' `pipeline` around a compiled model, and generation inside of what else a program may be in."""

from __future__ import annotations

from typing import Any

import torch
from journey import GREEDY, Desk, Result, continued, journey
from programs.chat import TEMPLATE
from torch import Tensor
from transformers import pipeline


def made_by(model: Any, desk: Desk) -> Any:
    return pipeline("text-generation", model=model, tokenizer=desk.tokenizer, device=torch.device("cpu"))


@journey("sekv", draws=True)  # pipelines have a data loader, which draws its seed
def pipeline_of_one_and_of_several(model: Any, desk: Desk) -> Result:
    """The same lines for both models."""
    desk.tokenizer.padding_side = "left"
    texts = []
    for tokens in (350, 60, 420):
        haystack = desk.haystack("single", tokens)
        texts.append(haystack.context + haystack.questions[0].text)
    pipe = made_by(model, desk)
    one = pipe(texts[0], max_new_tokens=5, return_full_text=False, **GREEDY)
    several = pipe(texts, max_new_tokens=5, batch_size=3, return_full_text=False, **GREEDY)
    return [one[0]["generated_text"], [rows[0]["generated_text"] for rows in several]]


@journey("quest", same=True)
def pipeline_of_a_chat(model: Any, desk: Desk) -> Result:
    """Messages in, messages out, twice: the same lines for both models."""
    desk.tokenizer.chat_template = TEMPLATE
    haystack = desk.haystack("single", 400, 2)
    pipe = made_by(model, desk)
    messages = [{"role": "system", "content": haystack.context}]
    for question in haystack.questions:
        messages = [*messages, {"role": "user", "content": question.text.strip()}]
        messages = pipe(messages, max_new_tokens=3, **GREEDY)[0]["generated_text"]
    return [message["content"].split()[-3:] for message in messages if message["role"] == "assistant"]


def surroundings_plainly(model: Any, desk: Desk) -> Result:
    made = continued(model, question(desk), 5)
    return [made] * 4


def question(desk: Desk) -> Tensor:
    haystack = desk.haystack("single", 400)
    return desk.ids(haystack.context + haystack.questions[0].text)


@journey("snapkv", plain=surroundings_plainly, alone=True)
def generation_inside_of_other_modes(model: Any, desk: Desk) -> Result:
    """A caller's inference mode, autocast, gradients and default dtype change nothing; a state goes on outside of where it was made."""
    ids, out = question(desk), []
    with torch.inference_mode():
        state = model.prefill(ids)
    out.append(continued(model, ids, 5, state=state))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out.append(continued(model, ids, 5))
    with torch.enable_grad():
        out.append(continued(model, ids, 5))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        out.append(continued(model, ids, 5))
    finally:
        torch.set_default_dtype(default)
    return out
