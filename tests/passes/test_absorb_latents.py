"""Attention on latents: the same numbers as on heads, one KV head to remember; and what is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from semkv.api import compile as compile_model
from semkv.api import load
from semkv.compiled import CompiledModel
from semkv.config import CompileConfig
from semkv.errors import ConfigError, ProfileError
from semkv.ir import spec
from semkv.ir.plain_memory import PlainMemory
from semkv.passes.absorb_latents import AbsorbLatents
from semkv.passes.assign_budgets import AssignBudgets
from semkv.passes.base import PassOptions
from semkv.passes.rewrite_attention import RewriteAttention
from semkv.passes.surprisal_head import SurprisalHead
from semkv.profiles.schema import Profile, ProfileInfo
from semkv.profiles.schema.facts import ModelFacts, SiteFacts

RANK, NOPE, ROPE, VALUE = 12, 8, 4, 10


class LatentAttention(nn.Module):
    """6 query and `kv_heads` KV heads made of a latent of 12 numbers; subclasses say how."""

    kv_heads = 6

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lm_head = nn.Embedding(31, 32), nn.Linear(32, 31, bias=False)
        self.down, self.other = nn.Linear(32, RANK + ROPE), nn.Linear(32, RANK)
        self.up = nn.Linear(RANK, self.kv_heads * (NOPE + VALUE), bias=False)
        self.biased = nn.Linear(RANK, self.kv_heads * (NOPE + VALUE))
        self.q = nn.Linear(32, 6 * (NOPE + ROPE))
        self.o = nn.Linear(6 * VALUE, 32)

    def latent(self, x):
        c, rope = self.down(x).split((RANK, ROPE), -1)
        return c * (c.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(), torch.tanh(rope).unsqueeze(1)

    def heads(self, x):
        """Keys and values [B, heads, T, D]."""
        c, rope = self.latent(x)
        made = self.up(c).view(*x.shape[:2], self.kv_heads, NOPE + VALUE).transpose(1, 2)
        k, v = made.split((NOPE, VALUE), -1)
        return torch.cat((k, rope.expand(-1, self.kv_heads, -1, -1)), -1), v

    def forward(self, input_ids, positions):
        x = self.embed(input_ids)
        q = self.q(x).view(*x.shape[:2], 6, NOPE + ROPE).transpose(1, 2)
        out = torch.ops.semkv.attention(q, *self.heads(x), positions, site=0, scale=0.3)
        return self.lm_head(x + self.o(out.transpose(1, 2).reshape(*x.shape[:2], 6 * VALUE)))


class Grouped(LatentAttention):
    """Two query heads read each KV head; heads are split before they are transposed, by slices."""

    kv_heads = 3

    def heads(self, x):
        c, rope = self.latent(x)
        made = self.up(c.unsqueeze(1)).reshape(*x.shape[:2], self.kv_heads, NOPE + VALUE)
        v, k = made[..., :VALUE].permute(0, 2, 1, 3), made[..., VALUE:].transpose(1, 2)
        return torch.cat((rope.expand(-1, self.kv_heads, -1, -1), k), -1), v


class Pieces(LatentAttention):
    """Keys written over others, of two ranges of a projection; values of two ranges."""

    def heads(self, x):
        c, rope = self.latent(x)
        made = self.up(c).view(*x.shape[:2], self.kv_heads, NOPE + VALUE).transpose(1, 2)
        k = torch.slice_scatter(made[..., :12], made[..., 13:], 3, 0, 5)
        k = torch.slice_scatter(k, rope.expand(-1, self.kv_heads, -1, -1), 3, 5, 9)
        k = torch.slice_scatter(k, made[..., :3], 3, 9)
        return k, torch.cat((made[..., 8:13], made[..., 3:8]), -1)


class Biased(LatentAttention):
    """A bias moves every latent: it is no projection of it alone."""

    def heads(self, x):
        c, rope = self.latent(x)
        made = self.biased(c).view(*x.shape[:2], 6, NOPE + VALUE).transpose(1, 2)
        return torch.cat((made[..., :NOPE], rope.expand(-1, 6, -1, -1)), -1), made[..., NOPE:]


class TwoLatents(LatentAttention):
    """Values of another latent than keys."""

    def heads(self, x):
        k, _ = super().heads(x)
        return k, self.up(self.other(x)).view(*x.shape[:2], 6, NOPE + VALUE).transpose(1, 2)[..., :VALUE]


class OwnPosition(LatentAttention):
    """The whole key depends on the position, so that no projection can be moved to the query."""

    def heads(self, x):
        k, v = super().heads(x)
        return k * torch.cos(k), v


class OneHead(LatentAttention):
    """One head is smaller than its latent."""

    kv_heads = 1


def annotated(make_found: Callable, module: nn.Module):
    program = make_found(module.double().eval(), vocab_size=31)
    return SurprisalHead().run(program, PassOptions())


def logits_of(program, ids: torch.Tensor) -> torch.Tensor:
    options = PassOptions(method="sekv")
    program = RewriteAttention().run(AssignBudgets().run(program, options), options)
    positions = torch.arange(ids.shape[1]).expand(ids.shape).contiguous()
    state = PlainMemory(program.sites)
    hidden = [program.prefill(ids[:, :6], positions[:, :6], state), program.extend(ids[:, 6:], positions[:, 6:], state)]
    return program.head(torch.cat(hidden, 1))


@pytest.mark.parametrize("module_class", [LatentAttention, Grouped, Pieces], ids=lambda c: c.__name__)
def test_latents_give_what_heads_give(make_found, module_class):
    program = annotated(make_found, module_class())
    absorbed = AbsorbLatents().run(program, PassOptions())
    spec.check(absorbed)
    (site,) = absorbed.sites
    assert (site.q_heads, site.kv_heads, site.key_dim, site.value_dim) == (6, 1, RANK + ROPE, RANK)
    before = module_class.kv_heads * (NOPE + ROPE + VALUE)
    assert absorbed.notes[-1] == (
        f"absorb_latents: 1 of 1 sites read latents: 28 numbers per token and layer in place of {before}"
    )
    ids = torch.randint(0, 31, (2, 13), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(absorbed, ids), logits_of(program, ids), rtol=1e-11, atol=1e-12)
    weights = {p.data_ptr() for p in program.body.parameters()}
    assert {p.data_ptr() for p in absorbed.body.parameters()} <= weights, "weights are never copied"


@pytest.mark.parametrize("module_class", [Biased, TwoLatents, OwnPosition, OneHead], ids=lambda c: c.__name__)
def test_what_is_no_projection_of_one_small_latent_stays(make_found, module_class):
    program = annotated(make_found, module_class())
    absorbed = AbsorbLatents().run(program, PassOptions())
    assert absorbed.sites == program.sites
    assert absorbed.notes[-1] == "absorb_latents: 0 of 1 sites read latents"


COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 128,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 2}
FAMILIES = {
    "DeepseekV2": {**EXPERTS, "n_group": 2, "topk_group": 1},
    "DeepseekV3": {**EXPERTS, "n_group": 2, "topk_group": 1},
    "MiniCPM3": {},
    "Youtu": {},
    "Glm4MoeLite": {**EXPERTS, "n_group": 2, "topk_group": 1},
    "Mistral4": {**EXPERTS, "n_group": 2, "topk_group": 1},
}


def build(family: str, layers: int) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**COMMON | FAMILIES[family], num_hidden_layers=layers)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.fixture(scope="module")
def deepseek() -> nn.Module:
    return build("DeepseekV3", 2)


@pytest.fixture(scope="module")
def by_heads(deepseek) -> CompiledModel:
    return compile_model(deepseek, method="full")


@pytest.fixture(scope="module")
def on_latents(deepseek) -> CompiledModel:
    return compile_model(deepseek, method="full", config=CompileConfig(floor=0, latents=True))


QUICK = ("DeepseekV3",)
"""The others run with the slow tests."""


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in QUICK else [pytest.mark.slow]) for family in FAMILIES]
)
def test_families_with_latents(family):
    """Logits as the model's own, and a cache of 40 numbers per token and layer in place of 320."""
    if not hasattr(transformers, f"{family}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = build(family, 1)
    ids = torch.randint(3, 128, (2, 120), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
    states = []
    for latents in (True, False):
        compiled = compile_model(model, method="full", config=CompileConfig(floor=0, latents=latents, prefill_chunk=32))
        states.append(compiled.prefill(ids[:, :100]))
        compiled.extend(states[-1], ids[:, 100:])
    bound = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(states[0].logits.view_as(expected), expected, rtol=0, atol=bound)
    assert states[0].full_bytes * 8 == states[1].full_bytes


@pytest.mark.parametrize("method", ["streaming_llm", "infllm", "quest", "snapkv"])
def test_methods_hold_their_budget_of_latents(on_latents, method):
    compiled = on_latents.with_method(method, budget=0.5)
    state = compiled.prefill(torch.randint(3, 128, (1, 400), generator=torch.Generator().manual_seed(2)))
    for token in range(20):
        compiled.extend(state, torch.full((1, 1), 3 + token))
    assert state.stats.peak_share <= 1
    assert state.nbytes["device"] <= 0.5 * state.full_bytes
    assert state.full_bytes == pytest.approx(2 * 420 * 40 * 4)


def test_what_is_kept_by_place_answers_as_with_heads(by_heads, on_latents):
    """First and recent tokens are the same tokens; only rounding differs."""
    ids = torch.randint(3, 128, (1, 300), generator=torch.Generator().manual_seed(4))
    found = []
    for compiled in (by_heads, on_latents):
        compiled = compiled.with_method("streaming_llm", budget=64)
        found.append(compiled.extend(compiled.prefill(ids), ids[:, :9], all_logits=True))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


def test_an_artifact_keeps_latents(on_latents, tmp_path):
    compiled = on_latents.with_method("streaming_llm", budget=0.5)
    compiled.save(tmp_path / "artifact")
    again = load(tmp_path / "artifact")
    ids = torch.randint(3, 128, (1, 100), generator=torch.Generator().manual_seed(5))
    assert torch.equal(again.prefill(ids).logits, compiled.prefill(ids).logits)
    assert again.program.sites[0].kv_heads == 1


def test_a_model_without_latents_is_refused():
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with pytest.raises(
        ConfigError, match=r"latents=True is for models that make keys and values of all heads from one latent"
    ):
        compile_model(model, method="full", config=CompileConfig(floor=0, latents=True))


def test_a_profile_of_heads_is_refused_for_latents(deepseek, by_heads):
    sites = tuple(
        SiteFacts(
            index=i, name=f"layer {i}", store=i, q_heads=8, kv_heads=8, key_dim=24, value_dim=16, treatment="method"
        )
        for i in range(2)
    )
    facts = ModelFacts(name="tiny", dtype="float32", vocab_size=128, max_positions=512, sites=sites)
    profile = Profile(ProfileInfo(fingerprint=by_heads.fingerprint, model=facts))
    profile.check_stores(by_heads.program.stores)
    with pytest.raises(ProfileError, match=r"8 KV heads of 24 \+ 16 numbers in layer 0.*1 of 24 \+ 16.*--latents"):
        compile_model(deepseek, profile, method="full", config=CompileConfig(floor=0, latents=True))
