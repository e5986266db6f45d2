"""Trained methods on latents: calibrated on them, the budget held, and the full model where nothing has to go."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from semkv.compiled import CompiledModel
from semkv.profiles.schema.retrieval_head import PREFIX
from tests.conftest import VOCABULARY
from tests.eager_steps import eagerly
from tests.methods.naive_retrieval import assert_best, naive_weights

pytestmark = pytest.mark.slow  # tests/passes/test_absorb_latents.py has a family and methods by default

OPTIONS = {
    "specontext": {"strict": True, "window": 8},
    "compresskv": {"recoverable": True},
    "heterocache": {"strict": True},
    "mixed": {"others": "spans"},
    "sekv": {},
    "sketch": {},
    "sentencekv": {},
}


@pytest.fixture(scope="module")
def latent(profiled) -> CompiledModel:
    """A small DeepSeek-V3 whose memory holds latents of 16 numbers and a shared key of 8."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return profiled(DeepseekV3ForCausalLM(config).eval(), latents=True)


def test_the_profile_is_of_latents(latent):
    assert [(site.q_heads, site.kv_heads, site.key_dim, site.value_dim) for site in latent.program.sites] == [
        (8, 1, 24, 16)
    ] * 2
    latent.profile.check_stores(latent.program.stores)


@pytest.mark.parametrize("method", OPTIONS)
def test_trained_methods_hold_their_budget_of_latents(latent, random_ids, method):
    compiled = latent.with_method(method, budget=0.5, **OPTIONS[method])
    state = compiled.prefill(random_ids(400, 1)[None])
    for token in range(12):
        compiled.extend(state, random_ids(1, token)[None])
    assert state.stats.peak_share <= 1
    assert state.nbytes["host"] > 0
    assert state.logits.isfinite().all()


def test_a_retrieval_head_chooses_latents(latent, random_ids):
    """SpeContext Sec. 4.3: one selection for the one KV head there is, in every layer; with room for all, the full model."""
    ids, more = random_ids(120, 1)[None], random_ids(6, 2)[None]
    full = latent.prefill(ids)
    compiled = latent.with_method("specontext", budget=1000, strict=True, window=8)
    state = compiled.prefill(ids)
    expected, got = latent.extend(full, more, all_logits=True), compiled.extend(state, more, all_logits=True)
    spans = [memory.spans for memory in state.rows[0].budgeted()]
    assert all(found is not None and found.host_tokens.length > 0 for found in spans)
    torch.testing.assert_close(got, expected, rtol=0, atol=0.02 * float(expected.abs().max()))


def test_a_retrieval_head_chooses_the_best_latents(latent, random_ids):
    """Below the full budget: the tokens that the head gives most weight to, one choice for all query heads, and theirs are the latents that
    are read."""
    ids = random_ids(241, 3)[None]
    compiled = eagerly(latent.with_method("specontext", budget=0.9, window=8))
    record = compiled.prefill_record(ids[:, :240])
    state = compiled.compress(record)
    compiled.extend(state, ids[:, 240:])
    section = latent.profile.info.retrieval_head
    tensors = {name.removeprefix(PREFIX): x for name, x in latent.profile.tensors.items() if name.startswith(PREFIX)}
    hidden = torch.cat([record.features[site] for site in section.feature_sites], -1) if section.features else None
    named = dict(compiled.program.selector.named_parameters())
    (embedding,) = (x.detach() for name, x in named.items() if not name.startswith(PREFIX))
    weights = naive_weights(section, tensors, embedding, ids[0], hidden).amax(0)
    for memory in state.rows[0].budgeted():
        assert memory.site.kv_heads == 1
        folded, at = memory.spans.positions[0], memory.slots.positions[0]
        chosen = set(folded[memory.zoom.chosen[0]].tolist())
        assert_best(weights, chosen, set(folded.tolist()))
        held = at < 241
        assert set(at[held].tolist()) == chosen
        assert torch.equal(memory.slots.k[0, held], record.keys[memory.site.store][0, at[held].long()])
        assert torch.equal(memory.slots.v[0, held], record.values[memory.site.store][0, at[held].long()])
