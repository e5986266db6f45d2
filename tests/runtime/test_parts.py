"""Parts of a store's heads: joined they are what the whole would be, mixed they are what each would be alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from semkv.compiled import CompiledModel
from semkv.config import CompileConfig
from semkv.ir.memory import Entries
from semkv.ir.site import AttentionSite
from semkv.kernels.mixed_attention import mixed_attention_reference
from semkv.methods import SeKV, StreamingLLM
from semkv.methods.base import Method
from semkv.runtime.components import Part, Plan
from semkv.runtime.decode.join import join_parts, stack_rows
from semkv.runtime.store.quantization import quantize

SITE = AttentionSite(index=0, name="layer", store=0, q_heads=6, kv_heads=3, key_dim=8, value_dim=6, scale=0.35)


@dataclass(frozen=True)
class Divided(Method):
    """Every KV head a part of its own, of the methods in `kinds` in turn; `shares` of the budget per head."""

    kinds: tuple[Method, ...] = (StreamingLLM(),)
    shares: tuple[float, ...] = ()

    name: ClassVar[str] = "divided"
    minimum_tokens: ClassVar[int] = 16

    def components(self, program, profile):
        return self.kinds[0].components(program, profile)

    def plan(self, program, profile):
        made = [kind.components(program, profile) for kind in self.kinds]
        return Plan(
            {
                site.store: tuple(
                    Part(
                        head,
                        head + 1,
                        made[head % len(made)],
                        (self.shares or (1 / site.kv_heads,) * site.kv_heads)[head],
                    )
                    for head in range(site.kv_heads)
                )
                for site in program.stores
                if site.treatment == "method"
            }
        )


@pytest.mark.parametrize("kind", [StreamingLLM(), SeKV(router="coarse", min_span=4)])
def test_heads_apart_are_heads_together(wide_program, prompt, kind):
    """The same composition for every head with an even share: the same tokens (heads apart pay for their own positions,
    which whole pages hide)."""
    settings = CompileConfig(floor=0, kv_dtype="float32", page_size=8)
    made = {}
    for method in (kind, Divided(kinds=(kind,))):
        compiled = CompiledModel(wide_program, None, method, 0.4, settings)
        state = compiled.prefill(prompt(180))
        for seed in range(2):
            compiled.extend(state, prompt(3, seed=seed))
        made[method.name] = state
        row = state.rows[0]
        assert row.traffic.peak_share <= 1
    whole, apart = made.values()
    assert len(apart.rows[0].stores[0]) == wide_program.sites[0].kv_heads
    torch.testing.assert_close(apart.logits, whole.logits, rtol=1e-4, atol=1e-5)


def test_a_mixture_holds_its_budget_and_survives_saving(double_program, prompt, resident, tmp_path):
    mixture = Divided(kinds=(StreamingLLM(), SeKV(router="coarse", min_span=4, fixed_share=0.6)), shares=(0.3, 0.7))
    compiled = CompiledModel(
        double_program, None, mixture, 0.5, CompileConfig(floor=0, kv_dtype="float64", page_size=1)
    )
    state = compiled.prefill(prompt(200))
    streaming, sekv = state.rows[0].stores[0]
    assert streaming.spans is None
    assert sekv.spans.count > 3
    for seed in range(8):
        compiled.extend(state, prompt(9, seed=seed))
        assert resident(state.rows[0]) <= state.rows[0].cap_bytes(state.lengths[0])
    assert state.stats.peak_share <= 1
    state.save(tmp_path / "state")
    again = compiled.load_state(tmp_path / "state")
    for seed in range(3):
        here, there = compiled.extend(state, prompt(4, seed=seed)), compiled.extend(again, prompt(4, seed=seed))
        assert torch.equal(here, there)


def _entries(heads: int, exact: int, coarse: int, spans: int, bias: bool, generator: torch.Generator) -> Entries:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def where(*shape: int) -> torch.Tensor:
        return torch.randint(0, 40, shape, generator=generator)

    made = {
        "block_k": [draw(heads, exact, 8)],
        "block_v": [draw(heads, exact, 6)],
        "block_positions": [where(1, exact)],
    }
    if bias:
        made["block_bias"] = [draw(2 * heads, 2, exact)]
    if coarse:
        mean_k = quantize(draw(heads, coarse, 8), 4)
        made["block_k"].append(mean_k.codes)
        made["block_k_scale"] = [None, mean_k.scale]
        made["block_v"].append(draw(heads, coarse, 6))
        made["block_positions"].append(where(heads, coarse))
        made["block_bias"] = [*made.get("block_bias", [None]), draw(2 * heads, 1, coarse)]
    if spans:
        rank, length = spans + 1, spans + 2
        made |= {
            "key_u": draw(heads, spans, length, rank),
            "key_s": draw(heads, spans, rank),
            "key_v": draw(heads, spans, 8, rank),
            "value_u": draw(heads, spans, length, rank),
            "value_s": draw(heads, spans, rank),
            "value_v": draw(heads, spans, 6, rank),
            "factored_positions": where(heads, spans, length),
            "factored_bias": draw(2 * heads, 2, spans, length),
        }
    return Entries(**made)


@pytest.mark.parametrize(
    "sizes",
    [
        ((5, 0, 0, False), (5, 0, 0, False), (5, 0, 0, False)),
        ((5, 3, 0, False), (9, 0, 2, True), (1, 4, 0, False)),
        ((4, 0, 3, True), (6, 0, 1, False), (2, 2, 0, True)),
    ],
)
def test_joined_parts_attend_as_each_alone(sizes):
    generator = torch.Generator().manual_seed(1)
    parts = [_entries(1, *size, generator) for size in sizes]
    q = torch.randn(6, 2, 8, generator=generator, dtype=torch.float64)
    at = torch.tensor([[50, 51]])
    joined = join_parts(parts, [SITE.part(head, head + 1, 1.0) for head in range(3)], 2)
    got = mixed_attention_reference(q[None], at, *stack_rows([joined], SITE, 2), scale=0.35)[0]
    for head, part in enumerate(parts):
        own = slice(2 * head, 2 * head + 2)
        alone = mixed_attention_reference(q[None, own], at, *stack_rows([part], SITE, 2), scale=0.35)[0]
        torch.testing.assert_close(got[own], alone, rtol=0, atol=1e-12)
