"""Prompts given as embeddings: the same as ids, followed by ids, of every call that reads a prompt."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import semkv
from semkv.compiled import CompiledModel
from semkv.errors import ConfigError, InputError
from semkv.model.huggingface import CACHE
from semkv.runtime.prompt.content import UNKNOWN

VOCAB, HIDDEN = 61, 32
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def compiled(llama: LlamaForCausalLM) -> CompiledModel:
    return semkv.compile(llama, method="full", config=semkv.CompileConfig(prefill_chunk=16))


def prompt(rows: int = 2, tokens: int = 37) -> Tensor:
    return torch.randint(1, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(3))


def test_embeddings_of_ids_are_the_ids(llama: LlamaForCausalLM, compiled: CompiledModel) -> None:
    ids = prompt()
    embeds = llama.get_input_embeddings()(ids).detach()
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    expected = compiled.generate(ids, attention_mask=mask, **GREEDY)[:, ids.shape[1] :]
    out = compiled.generate(inputs_embeds=embeds, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(out.sequences, expected)  # new tokens alone, as in transformers
    assert torch.equal(llama.generate(inputs_embeds=embeds, attention_mask=mask, **GREEDY), expected)
    state = out[CACHE]
    assert state.lengths == [37 - 9 + 5, 37 + 5]
    assert state.ids[0].tolist() == [UNKNOWN] * 28 + expected[0].tolist()
    for options in ({"num_beams": 2}, {"num_return_sequences": 2, "num_beams": 2}, {"max_length": 41}):
        asked = {**GREEDY, **options} if "max_length" not in options else {"do_sample": False, **options}
        assert torch.equal(
            compiled.generate(inputs_embeds=embeds, **asked), llama.generate(inputs_embeds=embeds, **asked)
        ), options

    together = compiled(ids, attention_mask=mask).logits
    assert torch.equal(compiled(inputs_embeds=embeds, attention_mask=mask).logits, together)
    assert float((compiled(inputs_embeds=embeds.flip(1)).logits - together).abs().max()) > 1e-2
    pieces = compiled.begin()
    for start in range(0, 37, 12):  # the last of one token
        logits = pieces.feed(inputs_embeds=embeds[1:, start : start + 12])
    assert float((logits - together[1, -1:]).abs().max()) < 1e-5


def test_a_turn_of_embeddings(llama: LlamaForCausalLM, compiled: CompiledModel) -> None:
    ids = prompt()
    embeds = llama.get_input_embeddings()(ids).detach()
    expected = compiled.generate(ids, **GREEDY)[:, 37:]
    state = compiled.prefill(ids[:, :20])
    assert torch.equal(compiled.generate(inputs_embeds=embeds[:, 20:], state=state, **GREEDY), expected)
    # and with a token of `generate` that was not read before
    assert state.pending is not None
    wanted = compiled(torch.cat([ids, expected, ids[:, :3]], 1)).logits[:, -1:]
    logits = compiled.extend(state, inputs_embeds=embeds[:, :3])
    assert float((logits - wanted).abs().max()) < 1e-5


@pytest.mark.parametrize("method", ["sekv", "quest", "h2o"])
def test_methods_compress_embeddings(llama: LlamaForCausalLM, compiled: CompiledModel, method: str) -> None:
    ids = prompt(2, 300)
    embeds = llama.get_input_embeddings()(ids).detach()
    small = compiled.with_method(method, 0.5, config=semkv.CompileConfig(floor=0))
    state = small.prefill(inputs_embeds=embeds)
    out = small.generate(ids[:, :7], state=state, **GREEDY)
    assert out.shape == (2, 13)
    assert state.nbytes["peak"] <= 0.5 * state.full_bytes
    turn = small.generate(inputs_embeds=embeds[:, :7], state=small.prefill(inputs_embeds=embeds), **GREEDY)
    assert torch.equal(out[:, 7:], turn)  # a turn of embeddings, over a compressed prompt of embeddings


def test_soft_prompts_are_embeddings_followed_by_ids(llama: LlamaForCausalLM) -> None:
    peft = pytest.importorskip("peft", reason="virtual tokens are those of PEFT")
    tuned = peft.get_peft_model(
        copy.deepcopy(llama), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=9, token_dim=HIDDEN)
    ).eval()
    nn.init.normal_(tuned.prompt_encoder["default"].embedding.weight)
    ids = prompt()
    expected = ids
    with torch.no_grad():
        for _ in range(6):  # PEFT's own forward, which puts the virtual tokens in front; without a cache
            expected = torch.cat([expected, tuned(input_ids=expected).logits[:, -1:].argmax(-1)], 1)
    compiled = semkv.compile(tuned.get_base_model(), method="full")
    state = compiled.prefill(inputs_embeds=tuned.get_prompt(batch_size=2).detach())
    assert torch.equal(compiled.generate(ids, state=state, **GREEDY), expected)
    assert not torch.equal(compiled.generate(ids, **GREEDY), expected)


def test_what_does_not_fit_is_refused(llama: LlamaForCausalLM, compiled: CompiledModel) -> None:
    ids = prompt()
    embeds = llama.get_input_embeddings()(ids).detach()
    for call in (compiled.generate, compiled.prefill, compiled):
        with pytest.raises(InputError, match="inputs_embeds and input_ids were given"):
            call(input_ids=ids, inputs_embeds=embeds)
        with pytest.raises(InputError, match=r"inputs_embeds \(2, 37, 31\): expected embeddings \[batch, tokens, 32\]"):
            call(inputs_embeds=embeds[..., :31])
        with pytest.raises(InputError, match=r"are torch.float16, the model computes in torch.float32"):
            call(inputs_embeds=embeds.half())
        with pytest.raises(InputError, match=r"inputs_embeds have numbers that are infinite or NaN"):
            call(inputs_embeds=embeds.index_fill(1, torch.tensor([3]), float("nan")))
        with pytest.raises(InputError, match=r"needs input_ids \[B, T\] or inputs_embeds \[B, T, H\]"):
            call()
        with pytest.raises(InputError, match=r"position ids: row 0 has 1 in column 0, where its memory counts 0"):
            call(inputs_embeds=embeds, position_ids=torch.arange(1, 38).expand(2, -1))
        with pytest.raises(InputError, match=r"positions of this model have 1 axes, so \[B, T\] is expected"):
            call(inputs_embeds=embeds, position_ids=torch.zeros(3, 2, 37, dtype=torch.int64))
        with pytest.raises(ConfigError, match=r"\(pixel_values=...\)"):
            call(input_ids=ids, pixel_values=embeds)
    with pytest.raises(InputError, match="do not fit the model's context of 1024"):
        compiled.generate(inputs_embeds=embeds.repeat(1, 28, 1))


class TwoReadings(nn.Module):
    """A model that looks its ids up twice, so that one embedding does not stand for them."""

    def __init__(self, llama: LlamaForCausalLM) -> None:
        super().__init__()
        self.llama, self.second = llama, nn.Embedding(VOCAB, HIDDEN)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        embeds = self.llama.get_input_embeddings()(input_ids) + self.second(input_ids)
        return self.llama(inputs_embeds=embeds, position_ids=position_ids, use_cache=False).logits


def test_a_model_that_reads_its_ids_twice_takes_ids_alone(llama: LlamaForCausalLM) -> None:
    torch.manual_seed(1)
    compiled = semkv.compile(TwoReadings(llama).eval(), method="full")
    with pytest.raises(ConfigError, match="it reads its ids in several places, and one embedding cannot stand for all"):
        compiled.prefill(inputs_embeds=torch.zeros(1, 3, HIDDEN))


def test_positions_that_are_learned_stay(compiled: CompiledModel) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    embeds = model.get_input_embeddings()(prompt()).detach()
    with torch.no_grad():
        expected = model(inputs_embeds=embeds).logits
    assert float((semkv.compile(model, method="full")(inputs_embeds=embeds).logits - expected).abs().max()) < 1e-5
