"""Folded spans against a naive recomputation: means, merging, archiving, unfolding, and elastic loading."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from semkv.ir.site import AttentionSite
from semkv.ir.state_ops import EMPTY
from semkv.methods.forms import LowRankForms
from semkv.methods.routers import GateRouter
from semkv.runtime.budgets.costs import unit_cost_bytes
from semkv.runtime.components import Components, IndexPart, Summary
from semkv.runtime.store.factors import UnfoldedFactors
from semkv.runtime.store.places import ranges
from semkv.runtime.store.quantization import dequantize
from semkv.runtime.store.segments import Cut, Folding
from semkv.runtime.store.slots import Slots
from semkv.runtime.store.spans import FoldedSpans

SITE = AttentionSite(index=0, name="layer", store=0, q_heads=4, kv_heads=2, key_dim=16, value_dim=12, scale=0.25)
LENGTHS = [3, 8, 1, 5, 6, 4]
N = sum(LENGTHS)


def router() -> GateRouter:
    generator = torch.Generator().manual_seed(4)
    zeros = {0: torch.zeros(4)}
    return GateRouter({0: torch.randn(4, 4, 16, generator=generator)}, zeros, zeros)


def components(**changes) -> Components:
    base = Components(summary=Summary(bits=8), router=router(), host_form="raw", outside="folded")
    return replace(base, **changes)


def folded(parts: Components, seed: int = 0) -> tuple[FoldedSpans, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(spans, k, v, surprisal) of N tokens at positions 10, 11, ..., folded in two goes."""
    torch.manual_seed(seed)
    k, v, surprisal = torch.randn(2, N, 16), torch.randn(2, N, 12), torch.rand(N)
    spans = FoldedSpans(SITE, parts, torch.float32)
    cut = sum(LENGTHS[:2])
    positions = torch.arange(10, 10 + N)
    for rows, lengths in ((slice(0, cut), LENGTHS[:2]), (slice(cut, N), LENGTHS[2:])):
        spans.fold(Folding(k[:, rows], v[:, rows], Cut(positions[rows], surprisal[rows], torch.tensor(lengths))))
    return spans, k, v, surprisal


def edges() -> list[tuple[int, int]]:
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    return [(end - length, end) for end, length in zip(ends, LENGTHS)]


@pytest.mark.parametrize("weights", ["surprisal", "uniform"])
def test_summaries_are_weighted_means(weights):
    spans, k, v, surprisal = folded(components(summary=Summary(weights=weights, bits=8)))
    got_k, got_v = dequantize(spans.mean_k), dequantize(spans.mean_v)
    for unit, (start, end) in enumerate(edges()):
        w = surprisal[start:end] if weights == "surprisal" else torch.ones(end - start)
        w = w / w.sum()
        torch.testing.assert_close(got_k[:, unit], (k[:, start:end] * w[:, None]).sum(1), rtol=0, atol=0.02)
        torch.testing.assert_close(got_v[:, unit], (v[:, start:end] * w[:, None]).sum(1), rtol=0, atol=0.02)
        assert int(spans.positions[0, unit]) == 10 + (start + end - 1) // 2
    assert spans.lengths[0].tolist() == LENGTHS


def test_without_coarse_entries_no_values_are_kept():
    spans, *_ = folded(components(summary=Summary(attend=False)))
    assert spans.mean_v is None


@pytest.mark.parametrize(
    "parts",
    [
        components(),
        components(summary=Summary(attend=False)),
        components(unfold=False),
        components(summary=Summary(routing="uniform", bits=4)),
        components(summary=Summary(bits=4)),
        components(summary=Summary(bits=16)),
        components(summary=Summary(bits=16, routing="uniform")),
    ],
)
def test_the_declared_cost_of_a_span_is_what_it_takes(parts):
    spans, *_ = folded(parts)
    held = sum(x.nbytes for x in spans.device_tensors())
    assert held == pytest.approx(len(LENGTHS) * 2 * unit_cost_bytes(SITE, parts, torch.float32))


def read(spans: FoldedSpans, union: list[list[int]], resident: Slots | None = None) -> tuple[Slots, int]:
    """Slots with the units of each head, `resident` itself where there are some, and the bytes that came from the host."""
    chosen = torch.zeros(2, spans.count, dtype=torch.bool)
    for head, units in enumerate(union):
        chosen[head, units] = True
    slots = Slots(2, spans.room_kinds, torch.device("cpu")) if resident is None else resident
    slots.allow(int(spans.places.tokens(chosen).max()))
    return slots, slots.hold(chosen, spans)[0] * spans.host_tokens.token_nbytes


def unfolded(spans: FoldedSpans, union: list[list[int]], resident: UnfoldedFactors | None = None) -> UnfoldedFactors:
    """The factored units of each head."""
    chosen = torch.zeros(2, spans.count, dtype=torch.bool)
    for head, units in enumerate(union):
        chosen[head, units] = True
    segments = spans.factored_of(chosen)
    made = spans.unfold_factors(segments, resident, torch.device("cpu"))
    assert spans.factored_nbytes(segments) == made.nbytes, "what is said before is what it takes"
    return made


def check_tokens(spans: FoldedSpans, got: Slots, k, v, groups: list[list[int]], union: list[list[int]]) -> None:
    """Each head holds exactly the tokens of its units, with their keys, values, positions and units."""
    all_units = spans.places.units_of(got.places)
    for head, units in enumerate(union):
        expected = sorted((place, unit) for unit in units for place in groups[unit])
        count = got.places.shape[1]
        slots = got.places[head].argsort()[count - len(expected) :]
        empty = got.places[head] < 0
        assert int(empty.sum()) == count - len(expected)
        assert (got.positions[head, empty] == EMPTY).all()
        assert (all_units[head, empty] == -1).all()
        places = [place for place, _ in expected]
        assert got.positions[head, slots].tolist() == [10 + place for place in places]
        assert all_units[head, slots].tolist() == [unit for _, unit in expected]
        assert torch.equal(got.k[head, slots], k[head, places])
        assert torch.equal(got.v[head, slots], v[head, places])


def test_unfolding_raw_spans_per_head():
    spans, k, v, _ = folded(components())
    groups = [list(range(start, end)) for start, end in edges()]
    for union in ([[0, 3], [1, 2, 5]], [[], [4]], [[0, 1, 2, 3, 4, 5]] * 2, [[], []]):
        got, moved_nbytes = read(spans, union)
        check_tokens(spans, got, k, v, groups, union)
        moved = sum(LENGTHS[unit] for units in union for unit in units)
        assert moved_nbytes == moved * 28 * 4
        assert got.nbytes == sum(x.nbytes for x in got.tensors.values())


def test_what_is_resident_is_not_moved_again():
    spans, k, v, _ = folded(components())
    groups = [list(range(start, end)) for start, end in edges()]
    workspace, _ = read(spans, [[0, 3], [1, 5]])
    union = [[0, 2], [1, 4, 5]]
    got, moved = read(spans, union, workspace)
    assert got is workspace
    check_tokens(spans, got, k, v, groups, union)
    assert moved == (LENGTHS[2] + LENGTHS[4]) * 28 * 4
    assert read(spans, union, workspace)[1] == 0
    check_tokens(spans, got, k, v, groups, union)


def weighted_mean(x: torch.Tensor, surprisal: torch.Tensor, members: list[int]) -> torch.Tensor:
    """Eq. 2 over the tokens of all of the units together, [Hkv, D]."""
    places = [place for member in members for place in range(*edges()[member])]
    weight = surprisal[places] / surprisal[places].sum()
    return (x[:, places] * weight[:, None]).sum(1)


def test_merging_joins_neighbours_shortest_first():
    spans, k, v, surprisal = folded(components())
    means = dequantize(spans.mean_k)
    torch.testing.assert_close(dequantize(spans.mean_directions), torch.nn.functional.normalize(means, dim=2))
    assert spans.merge(2, longest=20) == 2
    merged = dequantize(spans.mean_k)
    torch.testing.assert_close(dequantize(spans.mean_directions), torch.nn.functional.normalize(merged, dim=2))
    # [3 8 1 5 6 4]: 1+5 is the shortest pair; 8 and 6 have lost their neighbour; then 6+4, before 3+8.
    groups = [[0], [1], [2, 3], [4, 5]]
    assert spans.lengths[0].tolist() == [3, 8, 6, 10]
    for unit, members in enumerate(groups):
        for mean, x in ((spans.mean_k, k), (spans.mean_v, v)):
            expected = weighted_mean(x, surprisal, members)
            torch.testing.assert_close(dequantize(mean)[:, unit], expected, rtol=0, atol=0.03)
    tokens = [[place for member in members for place in range(*edges()[member])] for members in groups]
    check_tokens(spans, read(spans, [[2, 3], [0, 2]])[0], k, v, tokens, [[2, 3], [0, 2]])
    assert spans.unit_nbytes().shape == (2, 4)
    assert spans.unit_nbytes().untyped_storage().nbytes() == 4 * 8, "heads that share their units share their sizes"
    assert spans.unit_nbytes()[0].tolist() == [count * (28 * 4 + 8) for count in (3, 8, 6, 10)]
    assert spans.index["norms"].shape == (4, 4, 1)


def test_what_does_not_merge_stays_as_it_is():
    """Codes and scales of the other units are not made anew."""
    spans, _, _, surprisal = folded(components())
    before = spans.clone()
    assert spans.merge(1, longest=20) == 1  # units 2 and 3
    others, were = [0, 1, 3, 4], [0, 1, 4, 5]
    for new, old in ((spans.mean_k, before.mean_k), (spans.mean_v, before.mean_v)):
        assert torch.equal(new.codes[:, others], old.codes[:, were])
        assert torch.equal(new.scale[:, others], old.scale[:, were])
    assert torch.equal(spans.index["norms"][:, others], before.index["norms"][:, were])
    assert torch.equal(spans.positions[:, others], before.positions[:, were])
    assert before.lengths[0].tolist() == LENGTHS, "a copy keeps its own"
    mean = dequantize(before.mean_k)
    left, right = (surprisal[slice(*edges()[unit])].sum() for unit in (2, 3))
    expected = (mean[:, 2] * left + mean[:, 3] * right) / (left + right)
    joined = spans.components.router.rebuild(spans.site, "norms", expected[:, None])
    torch.testing.assert_close(spans.index["norms"][:, 2:3], joined.to(torch.float16))


@pytest.mark.parametrize("bits", [8, 16])
def test_merged_spans_are_what_they_would_have_been_as_one(bits):
    """Means, norms and pooled vectors after merges, against spans that were folded together in the first place."""
    for routing in ("derived", "uniform"):
        parts = components(summary=Summary(bits=bits, routing=routing))
        spans, k, v, surprisal = folded(parts)
        assert spans.merge(2, longest=20) == 2  # [3 8 1+5 6+4]
        assert spans.merge(1, longest=20) == 1  # [3+8 1+5 6+4]
        whole = FoldedSpans(SITE, parts, torch.float32)
        whole.fold(Folding(k, v, Cut(torch.arange(10, 10 + N), surprisal, torch.tensor([11, 6, 10]))))
        assert spans.lengths.tolist() == whole.lengths.tolist()
        torch.testing.assert_close(spans.tables.mass, whole.tables.mass)
        close = {"rtol": 0, "atol": 0.04 if bits == 8 else 1e-5}
        torch.testing.assert_close(dequantize(spans.mean_k), dequantize(whole.mean_k), **close)
        torch.testing.assert_close(dequantize(spans.mean_v), dequantize(whole.mean_v), **close)
        for name in whole.index:
            torch.testing.assert_close(
                spans.indexed(name), whole.indexed(name), rtol=0, atol=0.08 if bits == 8 else 5e-3
            )


def test_units_without_surprisal_merge_by_size():
    spans = FoldedSpans(SITE, components(summary=Summary(bits=16)), torch.float32)
    torch.manual_seed(1)
    k, v = torch.randn(2, 6, 16), torch.randn(2, 6, 12)
    spans.fold(Folding(k, v, Cut(torch.arange(6), torch.zeros(6), torch.tensor([2, 4]))))
    assert spans.merge(1, 9) == 1
    torch.testing.assert_close(spans.mean_k[:, 0], k.mean(1))


def test_merging_stops_at_the_longest_span_allowed():
    spans, *_ = folded(components())
    assert spans.merge(9, longest=7) == 1
    assert spans.merge(9, longest=6) == 0
    assert spans.lengths[0].tolist() == [3, 8, 6, 6, 4]


def test_archived_spans_stay_on_the_host_only():
    spans, k, v, _ = folded(components())
    waiting, everything = spans.waiting_nbytes, [x.tolist() for x in spans.waiting_places()]
    spans.merge(1, 20)
    assert spans.archive(2) == 2
    assert spans.lengths[0].tolist() == [6, 6, 4]
    assert spans.tables.segment_unit.tolist() == [[0, 0, 1, 2]]
    assert spans.waiting_nbytes == waiting
    assert [x.tolist() for x in spans.waiting_places()] == everything == [list(range(N)), list(range(10, 10 + N))]
    tokens = [[place for member in members for place in range(*edges()[member])] for members in ([2, 3], [4], [5])]
    check_tokens(spans, read(spans, [[0, 2], [1]])[0], k, v, tokens, [[0, 2], [1]])
    spans.archive(9)
    assert spans.count == 0
    assert spans.tables.segment_unit.shape == (1, 0)
    assert sum(x.nbytes for x in spans.device_tensors()) == 0
    torch.manual_seed(8)
    new_k, new_v = torch.randn(2, 4, 16), torch.randn(2, 4, 12)
    spans.fold(Folding(new_k, new_v, Cut(torch.arange(90, 94), torch.ones(4), torch.tensor([4]))))
    got, _ = read(spans, [[0], []])
    assert torch.equal(got.k[0, :4], new_k[0])
    assert got.positions[0].tolist() == [90, 91, 92, 93]


def low_rank(k: torch.Tensor, rank: int) -> torch.Tensor:
    """Each span of tokens made exactly of rank `rank`."""
    parts = []
    for start, end in edges():
        u, s, vh = torch.linalg.svd(k[:, start:end], full_matrices=False)
        parts.append((u[..., :rank] * s[:, None, :rank]) @ vh[:, :rank])
    return torch.cat(parts, 1)


@pytest.mark.parametrize("resident", [False, True])
def test_unfolding_factored_spans(resident):
    forms = LowRankForms(max_rank=4, only_if_smaller=False, tolerance=1e-4)
    spans = FoldedSpans(SITE, components(forms=forms), torch.float32)
    torch.manual_seed(0)
    k, v = low_rank(torch.randn(2, N, 16), 2), low_rank(torch.randn(2, N, 12), 3)
    spans.fold(Folding(k, v, Cut(torch.arange(10, 10 + N), torch.rand(N), torch.tensor(LENGTHS))))
    assert spans.host_tokens.length == 0
    union = [[1, 3], [4]]
    before = unfolded(spans, [[3, 5], [0, 4]]) if resident else None
    got = unfolded(spans, union, before)
    rebuilt_k = (got.parts["key_u"] * got.parts["key_s"][..., None, :]) @ got.parts["key_v"].mT
    rebuilt_v = (got.parts["value_u"] * got.parts["value_s"][..., None, :]) @ got.parts["value_v"].mT
    for head, units in enumerate(union):
        for place, unit in enumerate(units):
            start, end = edges()[unit]
            torch.testing.assert_close(rebuilt_k[head, place, : end - start], k[head, start:end], rtol=0, atol=2e-3)
            torch.testing.assert_close(rebuilt_v[head, place, : end - start], v[head, start:end], rtol=0, atol=2e-3)
            assert got.positions[head, place, : end - start].tolist() == list(range(10 + start, 10 + end))
            assert int(got.unit[head, place]) == unit
    assert int(got.ids[1, 1]) == -1
    sizes = spans.host_factors.span_nbytes()
    fetched = int(sizes[0, 1]) if resident else int(sizes[0, [1, 3]].sum() + sizes[1, 4])
    assert got.moved_nbytes == fetched


def test_a_span_waits_in_the_smallest_faithful_form():
    """Long spans of low rank are factored, random ones wait as tokens; either is cheaper than the other form."""
    site = replace(SITE, key_dim=64, value_dim=64)
    torch.manual_seed(0)
    flat = torch.randn(2, 48, 1) @ torch.randn(2, 1, 64)
    k = torch.cat((flat, torch.randn(2, 48, 64)), 1)
    parts = Components(
        summary=Summary(),
        outside="folded",
        host_form="int8",
        unfold=False,
        forms=LowRankForms(max_rank=8, only_if_smaller=True),
    )
    spans = FoldedSpans(site, parts, torch.float16)
    spans.fold(Folding(k.half(), k.half(), Cut(torch.arange(96), torch.rand(96), torch.tensor([48, 48]))))
    assert spans.tables.segment_kind.tolist() == [1, 0]
    assert spans.host_tokens.length == 48
    raw_int8 = 48 * 2 * 2 * (64 + 2)
    assert int(spans.host_factors.span_nbytes().sum()) < raw_int8


def test_ranges():
    assert ranges(torch.tensor([5, 0, 9]), torch.tensor([2, 3, 1])).tolist() == [5, 6, 0, 1, 2, 9]
    assert ranges(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64)).tolist() == []


def test_a_clone_is_independent():
    spans, k, v, _ = folded(components())
    copy = spans.clone()
    copy.merge(2, 30)
    copy.archive(1)
    copy.fold(Folding(k[:, :2], v[:, :2], Cut(torch.tensor([90, 91]), torch.ones(2), torch.tensor([2]))))
    assert spans.lengths[0].tolist() == LENGTHS
    assert spans.host_tokens.length == N
    check_tokens(spans, read(spans, [[0, 5], [2]])[0], k, v, [list(range(*edge)) for edge in edges()], [[0, 5], [2]])


class Bounds:
    """An index of the smallest and largest key of each unit."""

    def index(self, site, summary):
        return {"low": IndexPart(2, 16, merge="min"), "high": IndexPart(2, 16, merge="max")}

    def build(self, site, folding, mean_k):
        return {"low": folding.cut.smallest(folding.k), "high": folding.cut.largest(folding.k)}

    def rebuild(self, site, name, mean_k):
        raise AssertionError("bounds merge by themselves")


def test_an_index_without_summaries_is_all_that_the_device_keeps():
    parts = components(summary=None, router=Bounds())
    spans, k, *_ = folded(parts)
    assert spans.mean_k is None
    assert (
        sum(x.nbytes for x in spans.device_tensors())
        == 6 * 2 * 2 * 16 * 2
        == 6 * 2 * unit_cost_bytes(SITE, parts, torch.float32)
    )
    assert spans.merge(1, 20) == 1
    members = [slice(*edge) for edge in edges()]
    joined = [members[0], members[1], slice(members[2].start, members[3].stop), members[4], members[5]]
    for unit, tokens in enumerate(joined):
        torch.testing.assert_close(spans.index["low"][:, unit], k[:, tokens].amin(1).half())
        torch.testing.assert_close(spans.index["high"][:, unit], k[:, tokens].amax(1).half())


def test_heads_may_have_units_of_their_own():
    torch.manual_seed(3)
    k, v = torch.randn(2, N, 16), torch.randn(2, N, 12)
    units = torch.stack([torch.arange(N) % 4, torch.arange(N).flip(0) % 4])
    spans = FoldedSpans(SITE, components(), torch.float32)
    ones = torch.ones(N, dtype=torch.int64)
    for part in (slice(0, 12), slice(12, N)):
        spans.fold(
            Folding(
                k[:, part],
                v[:, part],
                Cut(torch.arange(10, 10 + N)[part], torch.ones(N)[part], ones[part], units[:, part]),
            )
        )
    assert spans.count == 8
    assert spans.merge(3, 99) == 0, "units that heads do not share do not merge"
    got, _ = read(spans, [[1, 6], [0]])
    unit = spans.places.units_of(got.places)
    for head, chosen in enumerate(([1, 6], [0])):
        wanted = [t for t in range(N) if int(units[head, t]) + (0 if t < 12 else 4) in chosen]
        count = len(wanted)
        order = got.positions[head].argsort()[:count]
        assert (got.positions[head, order] - 10).tolist() == wanted
        assert torch.equal(got.k[head, order], k[head, wanted])
        assert [int(x) % 4 for x in unit[head, order]] == units[head, wanted].tolist()
    costs = spans.unit_nbytes() // spans.token_nbytes()
    for head in range(2):
        assert costs[head].tolist() == [
            int((units[head, p] == u).sum()) for p in (slice(0, 12), slice(12, N)) for u in range(4)
        ]
