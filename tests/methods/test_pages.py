"""Pages, outliers and clusters against loops: every token has one place, and what they cost fits the room."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv.ir.site import AttentionSite
from semkv.methods.clusterkv import KeyClusters, cluster
from semkv.methods.page_routers import MeanKeyRouter, MinMaxRouter, RepresentativeRouter, representative_scores
from semkv.methods.pages import Frame, Pages
from semkv.methods.shadowkv import OutlierPages, page_cosines
from semkv.methods.sketch_router import SketchRouter
from semkv.profiles.schema.codes import Codebooks
from semkv.runtime.budgets.costs import unit_cost_bytes
from semkv.runtime.components import Components
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.step import Step
from semkv.runtime.store.segments import Cut, Folding
from semkv.runtime.store.spans import FoldedSpans

SITE = AttentionSite(index=0, name="layer", store=0, q_heads=6, kv_heads=3, key_dim=8, value_dim=5, scale=0.35)
LENGTHS = [5, 9, 3, 7, 1]
N = sum(LENGTHS)


def prompt(n: int, seed: int = 0, queries: int | None = None) -> RowRecord:
    generator = torch.Generator().manual_seed(seed)
    made = RowRecord(ids=torch.arange(n), all_queries=queries is None)
    made.keys[0] = torch.randn(3, n, 8, generator=generator)
    made.values[0] = torch.randn(3, n, 5, generator=generator)
    made.queries[0] = torch.randn(6, queries or n, 8, generator=generator)
    return made


def places(division, n: int) -> list[int]:
    return sorted([*division.kept.tolist(), *division.folded.tolist(), *range(division.recent, n)])


SEGMENTERS = {
    "pages": lambda size: Pages(size, Frame(window=24)),
    "tokens": lambda size: Pages(1, Frame(window=24), fixed=True),
    "outliers": lambda size: OutlierPages(Pages(size, Frame(window=24)), outliers=3),
    "clusters": lambda size: KeyClusters(size, 3, Frame(window=24)),
}


@pytest.mark.parametrize("kind", list(SEGMENTERS))
@given(
    n=st.integers(1, 260),
    room=st.floats(24, 400),
    cost=st.floats(0.02, 1.5),
    page=st.sampled_from([1, 8]),
    size=st.sampled_from([3, 8, 16]),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_every_token_has_one_place_and_the_fixed_parts_their_room(kind, n, room, cost, page, size):
    division = SEGMENTERS[kind](size).segment(prompt(n), SITE, room, cost, page)
    found = places(division, n)
    assert len(set(found)) == len(found)
    missing = set(range(n)) - set(found)
    assert not missing or (kind == "tokens" and max(missing) < int(division.starts[0]))
    assert (division.lengths > 0).all()
    assert division.starts.tolist() == sorted(division.starts.tolist())
    units = len(division.lengths) if division.units is None else int(division.units.max()) + 1 if n else 0
    exact = [-(-count // page) * page for count in (len(division.kept), n - division.recent)]
    if units > 1:
        assert sum(exact) + units * cost <= room + 2 * page  # the window and kept tokens each round up to a page


@given(
    n=st.integers(60, 600),
    room=st.floats(24, 200),
    more=st.floats(0, 40),
    cost=st.floats(0.05, 6.0),
    share=st.sampled_from([1 / 4, 1 / 3, 1 / 2]),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_more_room_never_makes_pages_longer(n, room, more, cost, share):
    """A window that grows by whole pages does not take them from the index."""
    segmenter = Pages(16, Frame(window=64, share=share))
    made = [segmenter.segment(prompt(n), SITE, r, cost, 8).lengths.tolist() for r in (room, room + more)]
    longest = [max(lengths, default=0) for lengths in made]  # a window may leave nothing to fold
    assert longest[1] <= longest[0]


def test_outliers_are_the_pages_that_their_mean_describes_worst():
    made, segmenter = prompt(120, seed=2), OutlierPages(Pages(8, Frame(window=16)), outliers=3)
    plain = segmenter.pages.segment(made, SITE, 90, 0.1, 8)
    worst = []
    for start, length in zip(plain.starts.tolist(), plain.lengths.tolist()):
        keys = made.keys[0][:, start : start + length]
        mean = keys.mean(1, keepdim=True)
        worst.append(float(torch.cosine_similarity(keys, mean.expand_as(keys), dim=-1).min()))
    torch.testing.assert_close(page_cosines(made.keys[0], plain), torch.tensor(worst))
    chosen = sorted(range(len(worst)), key=lambda place: worst[place])[:2]  # a quarter of the room: two pages of 8
    division = segmenter.segment(made, SITE, 90, 0.1, 8)
    expected = [t for place in sorted(chosen) for t in range(int(plain.starts[place]), int(plain.starts[place]) + 8)]
    assert division.kept.tolist() == [*range(4), *expected]


def test_clusters_hold_what_is_nearest_to_their_centroid():
    """After enough rounds every key is in the cluster whose mean direction is nearest, in every head by itself."""
    k = torch.randn(2, 90, 8, generator=torch.Generator().manual_seed(0))
    found = cluster(k, 7, 60)
    for head in range(2):
        units = int(found[head].max()) + 1
        unit = torch.nn.functional.normalize(k[head], dim=-1)
        means = torch.stack([unit[found[head] == number].sum(0) for number in range(units)])
        nearest = (unit @ torch.nn.functional.normalize(means, dim=-1).T).argmax(-1)
        assert torch.equal(nearest, found[head])
        firsts = [int((found[head] == number).nonzero()[0]) for number in range(units)]
        assert firsts == sorted(firsts), "numbered by their first token"


def folded(router, seed: int = 0) -> tuple[FoldedSpans, RowRecord]:
    made = prompt(N, seed)
    components = Components(router=router, host_form="raw", outside="folded")
    spans = FoldedSpans(SITE, components, torch.float32)
    everything = torch.arange(N)
    spans.fold(
        Folding(
            made.keys[0], made.values[0], Cut(everything, torch.ones(N), torch.tensor(LENGTHS), None, made.ids), made
        )
    )
    held = sum(x.nbytes for x in spans.device_tensors())
    assert held == pytest.approx(len(LENGTHS) * SITE.kv_heads * unit_cost_bytes(SITE, components, torch.float32))
    return spans, made


def edges() -> list[tuple[int, int]]:
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    return [(end - length, end) for end, length in zip(ends, LENGTHS)]


def scores_of(router, spans) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(9))
    return q, router.score(SITE, q, spans, Step.alone(SITE, q))


def check(scores: torch.Tensor, q: torch.Tensor, bound, atol: float = 2e-3) -> None:
    for head in range(6):
        for t in range(2):
            raw = torch.tensor([bound(head // 2, q[head, t], start, end) for start, end in edges()]) * SITE.scale
            torch.testing.assert_close(scores[head, t], raw.log_softmax(-1), rtol=0, atol=atol)


def test_bounds_of_pages():
    router = MinMaxRouter(bits=16)
    spans, made = folded(router)
    q, scores = scores_of(router, spans)

    def bound(kv: int, query: torch.Tensor, start: int, end: int) -> float:
        k = made.keys[0][kv, start:end]
        return float(sum(max(query[d] * k[:, d].min(), query[d] * k[:, d].max()) for d in range(8)))

    check(scores, q, bound)
    for kv in range(3):
        for start, end in edges():
            assert (
                bound(kv, q[2 * kv, 0], start, end) >= float((made.keys[0][kv, start:end] @ q[2 * kv, 0]).max()) - 1e-5
            )


@pytest.mark.parametrize("direction", [False, True])
def test_means_of_pages(direction):
    router = MeanKeyRouter(bits=16, direction=direction)
    spans, made = folded(router)
    q, scores = scores_of(router, spans)

    def bound(kv: int, query: torch.Tensor, start: int, end: int) -> float:
        mean = made.keys[0][kv, start:end].mean(0)
        return float(query @ (mean / mean.norm() if direction else mean))

    check(scores, q, bound)


def test_representatives_of_blocks():
    router = RepresentativeRouter(count=2, local=4, bits=16)
    spans, made = folded(router)
    q, scores = scores_of(router, spans)
    relevance = representative_scores(SITE, made, 4)
    for kv in range(3):
        for token in range(N):
            following = range(token + 1, min(N, token + 5))
            pairs = [
                float(made.queries[0][h, j] @ made.keys[0][kv, token]) for j in following for h in (2 * kv, 2 * kv + 1)
            ]
            expected = sum(pairs) / max(1, len(pairs))
            assert float(relevance[kv, token]) == pytest.approx(expected, abs=1e-4)

    def bound(kv: int, query: torch.Tensor, start: int, end: int) -> float:
        order = sorted(range(start, end), key=lambda token: -float(relevance[kv, token]))[:2]
        order += [order[-1]] * (2 - len(order))
        return float(sum(query @ made.keys[0][kv, token] for token in order))

    check(scores, q, bound, atol=4e-3)


def test_sketch_scores_are_those_of_the_decoded_codes():
    generator = torch.Generator().manual_seed(1)
    root = torch.randn(3, 8, 8, generator=generator)
    books = Codebooks(
        torch.randn(3, 8, generator=generator),
        torch.randn(3, 2, 256, 8, generator=generator),
        root @ root.mT + torch.eye(8),
    )
    router = SketchRouter({(0, 0): books})
    made = prompt(N)
    spans = FoldedSpans(SITE, Components(router=router, host_form="raw", outside="folded"), torch.float32)
    spans.fold(
        Folding(made.keys[0], made.values[0], Cut(torch.arange(N), torch.ones(N), torch.ones(N, dtype=torch.int64)))
    )
    assert sum(x.nbytes for x in spans.device_tensors()) == N * 3 * 2  # a byte per stage, and nothing else
    q, scores = scores_of(router, spans)
    keys = books.decode(books.encode(made.keys[0]))
    for head in range(6):
        raw = q[head] @ keys[head // 2].mT
        torch.testing.assert_close(scores[head], (raw * SITE.scale).log_softmax(-1), rtol=0, atol=1e-3)
    assert spans.merge(3, 99) == 0, "tokens do not merge: the oldest leave the device"
