"""Tokens that stay folded are attended to through their codes: against attention over decoded keys and values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from semkv.ir.site import AttentionSite
from semkv.methods.sketch_router import SketchRouter
from semkv.profiles.schema.codes import Codebooks
from semkv.runtime.components import Components
from semkv.runtime.step import Step
from semkv.runtime.store.segments import Cut, Folding
from semkv.runtime.store.site_memory import SiteMemory
from semkv.runtime.store.spans import FoldedSpans
from semkv.runtime.store.token_store import TokenStore

SITE = AttentionSite(index=0, name="layer", store=0, q_heads=4, kv_heads=2, key_dim=16, value_dim=12, scale=0.25)
FOLDED, EXACT = 40, 5


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def router() -> SketchRouter:
    root = numbers(2, 16, 16) / 4
    keys = Codebooks(numbers(2, 16), numbers(2, 2, 256, 16, seed=3), root @ root.mT + torch.eye(16))
    return SketchRouter({(0, 0): keys}, {(0, 0): Codebooks(numbers(2, 12), numbers(2, 1, 256, 12, seed=5))})


def memory(own: SketchRouter) -> tuple[SiteMemory, dict[str, torch.Tensor]]:
    """A store with folded and recent tokens, and all of their numbers."""
    components = Components(router=own, outside="folded", exact_form="int8", window=8)
    spans = FoldedSpans(SITE, components, torch.float32)
    k, v = numbers(2, FOLDED, 16, seed=4), numbers(2, FOLDED, 12)
    one = torch.ones(FOLDED, dtype=torch.int64)
    spans.fold(Folding(k, v, Cut(torch.arange(FOLDED), torch.ones(FOLDED), one)))
    recent_k, recent_v = numbers(2, EXACT, 16, seed=8), numbers(2, EXACT, 12, seed=9)
    where = FOLDED + torch.arange(EXACT)[None]
    stores = (
        TokenStore(numbers(2, 0, 16), numbers(2, 0, 12), torch.zeros(1, 0), 8),
        TokenStore(recent_k, recent_v, where, 8),
    )
    held = {"k": k, "v": v, "recent_k": recent_k, "recent_v": recent_v}
    return SiteMemory(SITE, components, *stores, spans, device=torch.device("cpu")), held


def attended(site: AttentionSite, found: SiteMemory, q: torch.Tensor, allowance: float) -> torch.Tensor:
    """[Hq, T, Dv] by the operator."""
    entries = found.entries(site, q, allowance, Step.alone(site, q))
    batched = {
        name: [None if x is None else x[None] for x in own]
        for name in ("block_k", "block_v", "block_positions", "block_bias", "block_k_scale", "block_v_scale")
        if (own := getattr(entries, name)) is not None
    }
    entries = entries._replace(**batched)
    positions = FOLDED + EXACT + torch.arange(q.shape[1])[None]
    return torch.ops.semkv.mixed_attention(q[None], positions, *entries, scale=site.scale, softcap=site.softcap)[0]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("room", [0, 7, FOLDED])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_it_is_attention_over_decoded_keys_and_values(tokens, room, softcap):
    own = router()
    found, held = memory(own)
    site, q = replace(SITE, softcap=softcap), numbers(4, tokens, 16, seed=7)
    got = attended(site, found, q, 2 * room * found.spans.token_nbytes())
    seen = found.zoom.heads
    assert int(seen.any(1).view(2, 2, -1).any(1).sum()) == 2 * min(room, FOLDED)
    keys, values = own.books[0, 0], own.values[0, 0]
    guessed_k, guessed_v = keys.decode(keys.encode(held["k"])), values.decode(values.encode(held["v"]))
    exact_k, exact_v = found.spans.host_tokens.gather(torch.arange(FOLDED).expand(2, -1))
    for head in range(4):
        kv = head // 2
        for t in range(tokens):
            read = seen[head, t]
            k = torch.where(read[:, None], exact_k[kv], guessed_k[kv])
            v = torch.where(read[:, None], exact_v[kv], guessed_v[kv])
            logits = torch.cat([k, held["recent_k"][kv]]) @ q[head, t] * site.scale
            logits = softcap * torch.tanh(logits / softcap) if softcap else logits
            wanted = logits.softmax(0) @ torch.cat([v, held["recent_v"][kv]])
            torch.testing.assert_close(got[head, t], wanted, rtol=2e-3, atol=2e-3)
    assert found.reads_codes
    assert found.attended_nbytes >= found.spans.device_nbytes == 2 * FOLDED * 3


def test_without_value_codes_folded_tokens_are_not_in_the_softmax():
    own = replace(router(), values={})
    found, held = memory(own)
    q = numbers(4, 1, 16, seed=7)
    got = attended(SITE, found, q, 0)
    for head in range(4):
        logits = held["recent_k"][head // 2] @ q[head, 0] * SITE.scale
        torch.testing.assert_close(got[head, 0], logits.softmax(0) @ held["recent_v"][head // 2], rtol=1e-4, atol=1e-5)
    assert not found.reads_codes


def test_a_bias_by_distance_is_not_guessed():
    found, _ = memory(router())
    q = numbers(4, 1, 16, seed=7)
    found.entries(replace(SITE, has_bias=True), q, 0, Step.alone(SITE, q))
    assert not found.reads_codes
