"""Ways of choosing tokens: stop strings, sampling, beams, constraints, processors, guidance, loops by hand."""

from __future__ import annotations

from typing import Any

import torch
from journey import GREEDY, Desk, Result, continued, journey, refusal
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor

from semkv.errors import ConfigError
from semkv.model.huggingface import CACHE


def prompt(desk: Desk, tokens: int = 400) -> Tensor:
    haystack = desk.haystack("single", tokens)
    return desk.ids(haystack.context + haystack.questions[0].text)


@journey("chunkkv")
def stop_strings(model: Any, desk: Desk) -> Result:
    ids = prompt(desk)
    desk.tokenizer.add_tokens(
        ["abcdef"]
    )  # transformers joins every word to this one, which a vocabulary of words lacks
    made = continued(model, ids, 12, stop_strings=["."], tokenizer=desk.tokenizer)
    assert desk.tokenizer.decode(made).count(".") == 1
    return made


@journey("streaming_llm", draws=True)
def samples_of_a_seed(model: Any, desk: Desk) -> Result:
    ids, out = prompt(desk), []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=True,
            temperature=1.3,
            top_k=40,
            top_p=0.95,
            num_return_sequences=3,
        )
        out.append(made[:, ids.shape[1] :].tolist())
    assert out[0] == out[2] != out[1]
    return out


def beams(model: Any, ids: Tensor) -> Any:
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, num_beams=3, return_dict_in_generate=True, **GREEDY
    )


def beams_plainly(model: Any, desk: Desk) -> Result:
    ids = prompt(desk)
    whole = beams(model, ids).sequences
    more = torch.cat([whole, desk.ids(". the", start=False)], 1)
    return [whole[0, ids.shape[1] :].tolist(), continued(model, more, 6)]


@journey("pyramidkv", plain=beams_plainly)
def beam_search_and_going_on(model: Any, desk: Desk) -> Result:
    ids = prompt(desk)
    out = beams(model, ids)
    more = desk.ids(". the", start=False)
    second = model.generate(more, **{CACHE: out[CACHE]}, max_new_tokens=6, **GREEDY)
    desk.check(out[CACHE])
    return [out.sequences[0, ids.shape[1] :].tolist(), second[0, more.shape[1] :].tolist()]


@journey("cake")
def constrained_to_numbers(model: Any, desk: Desk) -> Result:
    ids = desk.ids(desk.haystack("single", 400).context)  # no question: free text would not be numbers
    numbers = desk.ids(" ".join(str(n) for n in range(10, 100)), start=False)[0].tolist()
    made = continued(model, ids, 5, prefix_allowed_tokens_fn=lambda row, text: numbers)
    assert set(made) <= set(numbers)
    return made


class Never(LogitsProcessor):
    """Rules some tokens out."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self.tokens] = -torch.inf
        return scores


@journey("infllm")
def processors_and_penalties(model: Any, desk: Desk) -> Result:
    ids = prompt(desk)
    never = Never(continued(model, ids, 2))
    return continued(model, ids, 10, logits_processor=[never], repetition_penalty=1.2, no_repeat_ngram_size=2)


@journey("clusterkv")
def guidance(model: Any, desk: Desk) -> Result:
    """Classifier-free guidance: against the same question without its context."""
    haystack = desk.haystack("single", 400)
    ids, bare = desk.ids(haystack.context + haystack.questions[0].text), desk.ids(haystack.questions[0].text)
    return continued(
        model,
        ids,
        6,
        guidance_scale=1.5,
        negative_prompt_ids=bare,
        negative_prompt_attention_mask=torch.ones_like(bare),
    )


@journey("shadowkv", same=True)
def a_loop_by_hand(model: Any, desk: Desk) -> Result:
    """`forward` with the output's cache, greedy: the same lines for both models."""
    step, cache, made = prompt(desk), None, []
    for _ in range(6):
        out = model(input_ids=step, use_cache=True, **({} if cache is None else {CACHE: cache}))
        cache, step = out[CACHE], out.logits[:, -1:].argmax(-1)
        made.append(int(step))
    return made


@journey("mixed", same=True)
def generation_configurations(model: Any, desk: Desk) -> Result:
    ids = prompt(desk)
    mask = torch.ones_like(ids)
    given = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=2)
    own = GenerationConfig.from_model_config(model.config)
    own.update(max_new_tokens=4, min_new_tokens=4, do_sample=False)
    made = [model.generate(ids, attention_mask=mask, generation_config=config) for config in (given, own)]
    made.append(model.generate(ids, attention_mask=mask, generation_config=given, max_new_tokens=3))
    return [out[0, ids.shape[1] :].tolist() for out in made]


def greedy_plainly(model: Any, desk: Desk) -> Result:
    return [continued(model, prompt(desk), 6), ["ConfigError", "ConfigError", "ConfigError"]]


@journey("specontext", plain=greedy_plainly)
def speculation_that_is_refused(model: Any, desk: Desk) -> Result:
    """What a compressed memory cannot do is refused by name, and the same call without it is answered."""
    ids, errors = prompt(desk), []
    for options in (
        {"prompt_lookup_num_tokens": 4},
        {"assistant_model": desk.model},
        {"penalty_alpha": 0.6, "top_k": 4},
    ):
        errors.append(refusal(ConfigError, lambda options=options: continued(model, ids, 6, **options)))
        assert next(iter(options)) in str(errors[-1])
    return [continued(model, ids, 6), [type(error).__name__ for error in errors]]
