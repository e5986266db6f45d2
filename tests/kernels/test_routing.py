"""Routers and the choice of units by Triton's kernels give what they give in PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from semkv.ir.site import AttentionSite
from semkv.methods.routers import GateRouter
from semkv.methods.sketch_router import SketchRouter
from semkv.profiles.schema.codes import Codebooks
from semkv.runtime.components import Components, Router, Summary
from semkv.runtime.decode.choosing import choose_there, choose_units
from semkv.runtime.step import Step
from semkv.runtime.store.segments import Cut, Folding
from semkv.runtime.store.site_memory import SiteMemory
from semkv.runtime.store.spans import FoldedSpans
from semkv.runtime.store.token_store import TokenStore

pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')

SITE = AttentionSite(index=0, name="layer", store=0, q_heads=4, kv_heads=2, key_dim=16, value_dim=12, scale=0.25)
LENGTHS = [3, 8, 1, 5, 6, 4, 2, 7]
TOKENS = sum(LENGTHS)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def gate() -> GateRouter:
    return GateRouter({0: numbers(4, 5, 16)}, {0: numbers(4, seed=1)}, {0: numbers(4, seed=2)})


def sketch(stages: int) -> SketchRouter:
    root = numbers(2, 16, 16) / 4
    books = Codebooks(numbers(2, 16), numbers(2, stages, 256, 16, seed=3), root @ root.mT + torch.eye(16))
    return SketchRouter({(0, 0): books})


def memory(router: Router, lengths: list[int], *, fill: bool = True, summary: Summary | None = None) -> SiteMemory:
    """A store whose tokens are all folded, in two goes."""
    components = Components(summary=summary, router=router, host_form="raw", outside="folded", fill=fill)
    spans = FoldedSpans(SITE, components, torch.float32)
    k, v, cut = numbers(2, TOKENS, 16, seed=4), numbers(2, TOKENS, 12), sum(lengths[:3])
    where = torch.arange(TOKENS)
    for part, own in ((slice(0, cut), lengths[:3]), (slice(cut, TOKENS), lengths[3:])):
        spans.fold(Folding(k[:, part], v[:, part], Cut(where[part], torch.ones(len(where[part])), torch.tensor(own))))
    spans.host_tokens = spans.host_factors = spans.retired = (
        None  # routing reads none of them, and their tier's lock cannot go to another process
    )
    empty = (TokenStore(numbers(2, 0, 16), numbers(2, 0, 12), torch.zeros(1, 0), 8) for _ in range(2))
    return SiteMemory(SITE, components, *empty, spans, device=torch.device("cpu"))


ROUTERS = {
    "gate, 4 bits": (gate(), LENGTHS, Summary(bits=4)),
    "gate, 8 bits": (gate(), LENGTHS, Summary(bits=8)),
    "sketch, 4 bytes": (sketch(4), [1] * TOKENS, None),
    "sketch, 1 byte": (sketch(1), [1] * TOKENS, None),
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_scores_are_those_of_pytorch(on_device, name, tokens):
    router, lengths, summary = ROUTERS[name]
    spans, q = memory(router, lengths, summary=summary).spans, numbers(4, tokens, 16, seed=7)
    wanted = router.score(SITE, q, spans, Step.alone(SITE, q))
    step = replace(Step.alone(SITE, q), kernels=True)
    got = on_device(type(router).score, router, SITE, q, spans, step)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    # Of one token a sketch's sums are the same numbers, added in the same order.
    assert not torch.equal(got, wanted) or (tokens == 1 and "sketch" in name), "the same form scored both"


@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize("room", [0, 9, 20, 1000, float("inf")])
def test_units_are_those_of_pytorch(on_device, fill, room):
    """Units of unequal costs, of scores that some heads do not reach their thresholds with."""
    store = memory(gate(), LENGTHS, fill=fill, summary=Summary())
    score, allowance = numbers(4, 1, len(LENGTHS), seed=9), 2 * room * store.spans.token_nbytes()
    wanted = choose_units(store.components, store.spans, SITE, score, allowance)
    got = on_device(choose_there, store.components, store.spans, SITE, score, allowance)
    assert torch.equal(got.chosen, wanted.chosen)
    assert torch.equal(got.heads, wanted.heads)
    assert (got.own is None) == (wanted.own is None)
