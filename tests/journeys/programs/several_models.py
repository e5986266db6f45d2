"""More than one model, or more than one method of a model, in a process; and cells of a notebook that are run again."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from journey import Desk, Result, continued, journey, refusal
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import semkv
from semkv.errors import InputError


def prompt(desk: Desk) -> Tensor:
    haystack = desk.haystack("single", 420)
    return desk.ids(haystack.context + haystack.questions[0].text)


@cache
def another_model() -> LlamaForCausalLM:
    """A small one of random weights, in another dtype."""
    config = LlamaConfig(
        vocab_size=602,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    generator = torch.Generator(device="cpu").manual_seed(5)
    model = LlamaForCausalLM(config).to(torch.float64).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype, device="cpu"))
    return model


@cache
def another_compiled() -> Any:
    return semkv.compile(another_model())


def two_models_plainly(model: Any, desk: Desk) -> Result:
    ids, other = prompt(desk), another_model()
    return [continued(model, ids, 6), continued(other, ids, 6)]


@journey("snapkv", plain=two_models_plainly, alone=True)
def two_models_in_turns(model: Any, desk: Desk) -> Result:
    """A token of one, a token of the other."""
    ids = prompt(desk)
    both = [model, another_compiled().with_method(desk.method, desk.budget)]
    states = [one.prefill(ids) for one in both]
    made: list[list[int]] = [[], []]
    for _ in range(6):
        for one, state, tokens in zip(both, states, made):
            tokens.append(int(state.logits.argmax()))
            one.extend(state, torch.tensor([tokens[-1:]], dtype=torch.int64, device="cpu"))
    error = refusal(InputError, lambda: both[1].extend(states[0], ids[:, :2]))
    assert "another compiled model" in str(error)
    return made


def two_methods_plainly(model: Any, desk: Desk) -> Result:
    made = continued(model, prompt(desk), 4)
    return [made, made]


@journey("sketch", plain=two_methods_plainly, same=True)
def two_methods_of_one_model(model: Any, desk: Desk) -> Result:
    """One prompt is read once, and both methods go on from its record, in turns."""
    ids = prompt(desk)
    record = model.prefill_record(ids, surprisal=True, all_queries=True)
    both = [model, model.with_method("full")]
    states = [one.compress(record) for one in both]
    made: list[list[int]] = [[], []]
    for _ in range(4):
        for one, state, tokens in zip(both, states, made):
            tokens.append(int(state.logits.argmax()))
            one.extend(state, torch.tensor([tokens[-1:]], dtype=torch.int64, device="cpu"))
    desk.check(states[0])
    return made


def cells_plainly(model: Any, desk: Desk) -> Result:
    made = continued(another_model(), prompt(desk), 5)
    return [made, made]


@journey("quest", plain=cells_plainly, alone=True)
def cells_run_again(model: Any, desk: Desk) -> Result:
    """A notebook's cells: compile, ask, compile again under the same name; a state of before is refused."""
    ids, out, states = prompt(desk), [], []
    for _ in range(2):
        compiled = semkv.compile(another_model(), method=desk.method, budget=desk.budget)
        states.append(compiled.prefill(ids))
        out.append(continued(compiled, ids, 5, state=states[-1]))
    error = refusal(InputError, lambda: compiled.extend(states[0], ids[:, :1]))
    assert "another compiled model" in str(error)
    return out


def budgets_plainly(model: Any, desk: Desk) -> Result:
    made = continued(model, prompt(desk), 3)
    return [made] * 2


@journey("sekv", plain=budgets_plainly, same=True)
def budgets_in_tokens_and_as_a_share(model: Any, desk: Desk) -> Result:
    """A whole number is tokens per KV head, a fraction a share: both are kept, and both are enough for the answer."""
    ids, out = prompt(desk), []
    budgets = (None, None) if desk.budget is None else (150, 0.4)
    for budget in budgets:
        compiled = model.with_method(desk.method, budget)
        state = compiled.prefill(ids)
        out.append(continued(compiled, ids, 3, state=state))
        if isinstance(budget, int):
            assert state.nbytes["peak"] <= budget * state.full_bytes / state.lengths[0]
    return out
