"""Copies of an index on a device: made when they are asked for, once, and anew when the units change."""

from __future__ import annotations

import weakref

import pytest
import torch

from semkv.ir.site import AttentionSite
from semkv.methods.routers import GateRouter
from semkv.runtime.components import Components, Summary
from semkv.runtime.store.segments import Cut, Folding
from semkv.runtime.store.spans import FoldedSpans

SITE = AttentionSite(index=0, name="layer", store=0, q_heads=4, kv_heads=2, key_dim=16, value_dim=12, scale=0.25)
HERE, META = torch.device("cpu"), torch.device("meta")
"""Tensors that are moved to `meta` lose their numbers, and say where they are."""


def fold(spans: FoldedSpans, count: int) -> None:
    k, v = torch.randn(2, 3 * count, 16), torch.randn(2, 3 * count, 12)
    lengths = torch.full((count,), 3)
    spans.fold(Folding(k, v, Cut(torch.arange(3 * count), torch.ones(3 * count), lengths)))


@pytest.fixture
def spans() -> FoldedSpans:
    zeros = {0: torch.zeros(4)}
    router = GateRouter({0: torch.randn(4, 4, 16)}, zeros, zeros)
    made = FoldedSpans(SITE, Components(summary=Summary(), router=router, host_form="raw"), torch.float32)
    fold(made, 5)
    return made


def test_what_is_there_already_is_not_copied(spans):
    there = spans.on(HERE)
    assert there.lengths is spans.lengths
    assert there.mean_k.codes is spans.mean_k.codes
    assert there.indexed("norms") is spans.index["norms"]
    assert there.costs(spans).tolist() == spans.unit_nbytes().tolist()


def test_a_copy_is_made_once_until_the_units_change(spans):
    there = spans.on(META)
    assert spans.on(META) is there
    assert there.mean_v.codes is there.mean_v.codes
    assert there.mean_v.codes.device == META
    fold(spans, 2)
    again = spans.on(META)
    assert again is not there
    assert again.lengths.shape == (1, 7)
    spans.merge(2, 100)
    assert spans.on(META).lengths.shape[1] == spans.count < 7
    spans.archive(1)
    assert spans.on(META).lengths.shape[1] == spans.count


def test_constants_are_made_once_and_handed_on(spans):
    made = []

    def weights() -> torch.Tensor:
        made.append(1)
        return torch.ones(3)

    first = spans.on(META).constant("weights", weights)
    fold(spans, 1)
    assert spans.on(META).constant("weights", weights) is first
    assert made == [1]
    assert spans.on(HERE).constant("weights", weights).device == HERE


def test_spans_go_when_nothing_else_holds_them(spans):
    kept = spans.clone()
    kept.on(META).costs(kept)
    gone = weakref.ref(kept)
    del kept
    assert gone() is None


def test_a_copy_of_the_spans_has_an_index_of_its_own(spans):
    there, copy = spans.on(META), spans.clone()
    fold(copy, 1)
    assert copy.on(META).lengths.shape == (1, 6)
    assert spans.on(META) is there
