"""Capture: the stateless forward of the user's own model, which stays as it was."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from semkv.capture.export import capture
from semkv.errors import CaptureError, InputError
from semkv.ir import spec
from semkv.ir.graph import placeholders

VOCAB = 37


class Plain(nn.Module):
    """A decoder without a configuration: ids -> logits, positions made inside; embedding and projection are tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lm_head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB, bias=False)
        self.lm_head.weight = self.embed.weight
        self.mix = nn.Linear(16, 16)
        self.register_buffer("places", torch.randn(128, 16), persistent=False)
        self.eval()

    def hidden(self, ids):
        x = self.embed(ids) + self.places[: ids.shape[1]]
        return x + F.scaled_dot_product_attention(self.mix(x), x, x, is_causal=True)

    def forward(self, ids):
        return self.lm_head(self.hidden(ids))


class Named(Plain):
    def forward(self, ids):
        return SimpleNamespace(logits=self.lm_head(self.hidden(ids)), past=None)


class Tuple(Plain):
    def forward(self, ids):
        return self.lm_head(self.hidden(ids)), None


def llama(**changes) -> LlamaForCausalLM:
    settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    settings |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2}
    settings["vocab_size"] = VOCAB
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_layer=1, n_head=4, vocab_size=VOCAB, n_positions=128, bos_token_id=1, eos_token_id=2
    )
    return GPT2LMHeadModel(config).eval()


def run(program, ids, offset: int = 0) -> torch.Tensor:
    positions = torch.arange(offset, offset + ids.shape[1]).expand_as(ids)
    with torch.no_grad():
        return program.body(ids, positions)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_transformers_model_computes_the_same_at_any_size(build) -> None:
    model = build()
    program = capture(model)
    spec.check(program)
    assert tuple(placeholders(program.body.graph)) == ("input_ids", "positions")
    assert (program.stage, program.vocab_size, program.max_positions, program.batched) == ("captured", VOCAB, 128, True)
    for batch, length in ((3, 63), (1, 111), (2, 1)):
        ids = torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            torch.testing.assert_close(run(program, ids), model(ids, use_cache=False).logits, rtol=1e-5, atol=1e-6)


def test_positions_are_an_input() -> None:
    model = llama()
    program = capture(model)
    ids = torch.arange(2 * 9).view(2, 9)
    with torch.no_grad():
        expected = model(ids, position_ids=torch.arange(40, 49).expand(2, 9), use_cache=False).logits
    torch.testing.assert_close(run(program, ids, offset=40), expected)


@pytest.mark.parametrize("kind", [Plain, Named, Tuple])
def test_a_plain_module_works_whatever_it_returns(kind) -> None:
    module = kind()
    program = capture(module)
    assert program.vocab_size == VOCAB
    ids = torch.randint(0, VOCAB, (2, 63), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(run(program, ids), module.lm_head(module.hidden(ids)))


def test_parameters_and_buffers_are_the_model_s_own_under_its_names() -> None:
    module = Plain()
    body = capture(module).body
    assert body.embed.weight is module.embed.weight
    assert body.places is module.places
    targets = {node.target for node in body.graph.nodes if node.op == "get_attr"}
    tied = [
        target
        for target in targets
        if getattr(body.get_submodule(target.rpartition(".")[0]), "weight", None) is module.embed.weight
    ]
    assert tied, "tied weights are one tensor"
    assert targets <= {"embed.weight", "lm_head.weight", "mix.weight", "mix.bias", "places"}


def test_module_paths_are_those_of_the_user_s_model() -> None:
    body = capture(llama()).body
    (node,) = [n for n in body.graph.nodes if n.target == torch.ops.aten.scaled_dot_product_attention.default]
    assert list(node.meta["nn_module_stack"].values())[-1][0] == "model.layers.0.self_attn"


class Untidy(Plain):
    """A forward that assigns attributes and a buffer, as rotary embeddings of some families do."""

    def forward(self, ids):
        self.seen = ids.shape[1]
        self.scratch = self.places.sum()
        self.places = self.places * 1.0
        self.config.calls = 7
        return super().forward(ids)


def test_the_model_is_not_changed() -> None:
    module = Untidy()
    module.config = SimpleNamespace(calls=0, vocab_size=VOCAB)
    attributes, buffer = set(vars(module)), module.places
    before = {name: value.clone() for name, value in module.state_dict().items()}
    capture(module)
    assert set(vars(module)) == attributes
    assert module.places is buffer
    assert vars(module.config) == {"calls": 0, "vocab_size": VOCAB}
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


class OneRow(Plain):
    def forward(self, ids):
        (row,) = ids.unbind(0)
        return super().forward(row[None])


def test_a_forward_for_one_row_is_captured_unbatched() -> None:
    module = OneRow()
    program = capture(module)
    assert not program.batched
    assert "batch fixed at 1" in program.notes[0]
    ids = torch.arange(11)[None]
    with torch.no_grad():
        torch.testing.assert_close(run(program, ids), module(ids))


class Scores(Plain):
    def forward(self, ids):
        return SimpleNamespace(hidden=self.hidden(ids))


class LastToken(Plain):
    def forward(self, ids):
        return super().forward(ids)[:, -1]


class FixedLength(Plain):
    def forward(self, ids):
        if ids.shape[1] != 37:
            raise ValueError("37 tokens only")
        return super().forward(ids)


class OnlyLong(Plain):
    def forward(self, ids):
        x = super().forward(ids)
        return x * 2 if ids.shape[1] > 20 else x


class ByValue(Plain):
    def forward(self, ids):
        x = super().forward(ids)
        return x * 2 if bool((ids > 3).any()) else x


REFUSED = [
    (Scores, "the model returned SimpleNamespace without logits"),
    (LastToken, r"the model returns a tensor of shape .* expected logits \[B, T, vocab\]"),
    (FixedLength, "cannot capture the forward of FixedLength with a dynamic length"),
    (
        OnlyLong,
        r"not one computation for every length: export took a branch where `tokens > 20` .*, which does not hold at 2 tokens",
    ),
    (ByValue, "cannot capture the forward of ByValue with a dynamic length; its code branches on values or sizes"),
]


@pytest.mark.parametrize(("kind", "message"), REFUSED, ids=[kind.__name__ for kind, _ in REFUSED])
def test_a_forward_that_is_no_decoder_s_is_refused(kind, message) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(kind())


def test_a_branch_for_short_sequences_limits_the_context() -> None:
    class OnlyShort(Plain):
        def forward(self, ids):
            x = super().forward(ids)
            return x * 2 if ids.shape[1] > 64 else x

    assert capture(OnlyShort()).max_positions == 64


def test_what_is_no_model_in_evaluation_mode_is_refused() -> None:
    with pytest.raises(InputError, match=r"model is a function; expected a torch\.nn\.Module"):
        capture(lambda ids: ids)
    with pytest.raises(InputError, match="Identity has no parameters"):
        capture(nn.Identity().eval())
    with pytest.raises(InputError, match=r"it is in training mode, .* call model\.eval\(\) first"):
        capture(Plain().train())
    module = Plain()
    module.mix.train()
    with pytest.raises(InputError, match="its module 'mix' is in training mode"):
        capture(module)


def test_configurations_that_hide_what_they_compute_are_refused() -> None:
    module = Plain()
    module.config = SimpleNamespace(is_encoder_decoder=True)
    with pytest.raises(CaptureError, match="Plain is an encoder-decoder; expected a decoder-only model"):
        capture(module)
    module.config = SimpleNamespace(_attn_implementation="flash_attention_2")
    with pytest.raises(
        CaptureError, match=r'flash_attention_2.* load the model with attn_implementation="sdpa" or "eager"'
    ):
        capture(module)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(CaptureError, match=r"model\.rotary_emb scales rotary positions dynamically"):
        capture(llama(rope_parameters=rope))


def test_long_rope_switches_factors_as_the_model_does() -> None:
    factors = [1.0 + 0.1 * i for i in range(4)]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": [4 * f for f in factors],
        "original_max_position_embeddings": 48,
        "factor": 2.0,
    }
    model = llama(rope_parameters=rope)
    buffer = model.model.rotary_emb.inv_freq.clone()
    program = capture(model)
    assert torch.equal(model.model.rotary_emb.inv_freq, buffer)
    assert not hasattr(model.model.rotary_emb, "long_inv_freq")
    for length in (31, 100):
        ids = torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))
        result = run(program, ids)
        with torch.no_grad():
            torch.testing.assert_close(result, model(ids, use_cache=False).logits, rtol=1e-5, atol=1e-6)
    assert math.isfinite(float(result.sum()))
