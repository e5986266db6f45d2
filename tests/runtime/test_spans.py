"""Folded spans against a naive recomputation: means, merging, archiving, unfolding, and elastic loading."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from semkv.ir.site import AttentionSite
from semkv.methods.forms import LowRankForms
from semkv.methods.routers import GateRouter
from semkv.runtime.components import Components, Summary
from semkv.runtime.quantization import dequantize
from semkv.runtime.spans import FoldedSpans, Unfolded, ranges, span_cost_bytes

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
        spans.fold(k[:, rows], v[:, rows], positions[rows], surprisal[rows], torch.tensor(lengths))
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
        assert int(spans.positions[unit]) == 10 + (start + end - 1) // 2
    assert spans.lengths.tolist() == LENGTHS


def test_without_coarse_entries_no_values_are_kept():
    spans, *_ = folded(components(summary=Summary(attend=False)))
    assert spans.mean_v is None


@pytest.mark.parametrize("parts", [
    components(), components(summary=Summary(attend=False)), components(unfold=False),
    components(summary=Summary(routing="uniform", bits=4)), components(summary=Summary(bits=4)),
])  # fmt: skip
def test_the_declared_cost_of_a_span_is_what_it_takes(parts):
    spans, *_ = folded(parts)
    held = sum(x.nbytes for x in spans.device_tensors())
    assert held == pytest.approx(len(LENGTHS) * 2 * span_cost_bytes(SITE, parts))


def read(spans: FoldedSpans, union: list[list[int]], resident: Unfolded | None = None) -> Unfolded:
    chosen = torch.zeros(2, spans.count, dtype=torch.bool)
    for head, units in enumerate(union):
        chosen[head, units] = True
    return spans.unfold(chosen, resident)


def check_tokens(got: Unfolded, k, v, groups: list[list[int]], union: list[list[int]]) -> None:
    """Each head holds exactly the tokens of its units, with their keys, values, positions and units."""
    for head, units in enumerate(union):
        expected = [(place, unit) for unit in units for place in groups[unit]]
        count = len(expected)
        assert (got.tokens[head, count:] == -1).all()
        assert (got.unit[head, count:] == -1).all()
        assert got.positions[head, :count].tolist() == [10 + place for place, _ in expected]
        assert got.unit[head, :count].tolist() == [unit for _, unit in expected]
        places = [place for place, _ in expected]
        assert torch.equal(got.k[head, :count], k[head, places])
        assert torch.equal(got.v[head, :count], v[head, places])


def test_unfolding_raw_spans_per_head():
    spans, k, v, _ = folded(components())
    groups = [list(range(start, end)) for start, end in edges()]
    for union in ([[0, 3], [1, 2, 5]], [[], [4]], [[0, 1, 2, 3, 4, 5]] * 2, [[], []]):
        got = read(spans, union)
        check_tokens(got, k, v, groups, union)
        moved = sum(LENGTHS[unit] for units in union for unit in units)
        assert got.moved_nbytes == moved * 28 * 4
        assert got.nbytes == got.k.nbytes + got.v.nbytes + got.positions.nbytes


def test_what_is_resident_is_not_moved_again():
    spans, k, v, _ = folded(components())
    groups = [list(range(start, end)) for start, end in edges()]
    before = read(spans, [[0, 3], [1, 5]])
    union = [[0, 2], [1, 4, 5]]
    got = read(spans, union, before)
    check_tokens(got, k, v, groups, union)
    assert got.moved_nbytes == (LENGTHS[2] + LENGTHS[4]) * 28 * 4
    assert torch.equal(read(spans, union, got).k, got.k)
    assert read(spans, union, got).moved_nbytes == 0


def test_merging_joins_neighbours_shortest_first():
    spans, k, v, _ = folded(components())
    means = dequantize(spans.mean_k)
    assert spans.merge(2, longest=20) == 2
    # [3 8 1 5 6 4]: 1+5 is the shortest pair; 8 and 6 have lost their neighbour; then 6+4, before 3+8.
    groups = [[0], [1], [2, 3], [4, 5]]
    assert spans.lengths.tolist() == [3, 8, 6, 10]
    for unit, members in enumerate(groups):
        size = torch.tensor([float(LENGTHS[member]) for member in members])
        expected = (means[:, members] * (size / size.sum())[:, None]).sum(1)
        torch.testing.assert_close(dequantize(spans.mean_k)[:, unit], expected, rtol=0, atol=0.02)
    tokens = [[place for member in members for place in range(*edges()[member])] for members in groups]
    check_tokens(read(spans, [[2, 3], [0, 2]]), k, v, tokens, [[2, 3], [0, 2]])
    assert spans.unit_nbytes()[0].tolist() == [count * (28 * 4 + 4) for count in (3, 8, 6, 10)]
    assert spans.norms.shape == (4, 4)


def test_merging_stops_at_the_longest_span_allowed():
    spans, *_ = folded(components())
    assert spans.merge(9, longest=7) == 1
    assert spans.merge(9, longest=6) == 0
    assert spans.lengths.tolist() == [3, 8, 6, 6, 4]


def test_archived_spans_stay_on_the_host_only():
    spans, k, v, _ = folded(components())
    host = spans.host_nbytes
    spans.merge(1, 20)
    spans.archive(2)
    assert spans.lengths.tolist() == [6, 6, 4]
    assert spans.host_nbytes == host
    tokens = [[place for member in members for place in range(*edges()[member])] for members in ([2, 3], [4], [5])]
    check_tokens(read(spans, [[0, 2], [1]]), k, v, tokens, [[0, 2], [1]])
    spans.archive(9)
    assert spans.count == 0
    assert sum(x.nbytes for x in spans.device_tensors()) == 0
    torch.manual_seed(8)
    new_k, new_v = torch.randn(2, 4, 16), torch.randn(2, 4, 12)
    spans.fold(new_k, new_v, torch.arange(90, 94), torch.ones(4), torch.tensor([4]))
    got = read(spans, [[0], []])
    assert torch.equal(got.k[0], new_k[0])
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
    spans.fold(k, v, torch.arange(10, 10 + N), torch.rand(N), torch.tensor(LENGTHS))
    assert spans.host_tokens.length == 0
    union = [[1, 3], [4]]
    got = read(spans, union, read(spans, [[3, 5], [0, 4]]) if resident else None)
    rebuilt_k = (got.factors["key_u"] * got.factors["key_s"][..., None, :]) @ got.factors["key_v"].mT
    rebuilt_v = (got.factors["value_u"] * got.factors["value_s"][..., None, :]) @ got.factors["value_v"].mT
    for head, units in enumerate(union):
        for place, unit in enumerate(units):
            start, end = edges()[unit]
            torch.testing.assert_close(rebuilt_k[head, place, : end - start], k[head, start:end], rtol=0, atol=2e-3)
            torch.testing.assert_close(rebuilt_v[head, place, : end - start], v[head, start:end], rtol=0, atol=2e-3)
            assert got.factor_positions[head, place, : end - start].tolist() == list(range(10 + start, 10 + end))
            assert int(got.factor_unit[head, place]) == unit
    assert int(got.factor_ids[1, 1]) == -1
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
        summary=Summary(), outside="folded", host_form="int8", unfold=False,
        forms=LowRankForms(max_rank=8, only_if_smaller=True),
    )  # fmt: skip
    spans = FoldedSpans(site, parts, torch.float16)
    spans.fold(k.half(), k.half(), torch.arange(96), torch.rand(96), torch.tensor([48, 48]))
    assert spans.segment_kind.tolist() == [1, 0]
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
    copy.fold(k[:, :2], v[:, :2], torch.tensor([90, 91]), torch.ones(2), torch.tensor([2]))
    assert spans.lengths.tolist() == LENGTHS
    assert spans.host_tokens.length == N
    check_tokens(read(spans, [[0, 5], [2]]), k, v, [list(range(*edge)) for edge in edges()], [[0, 5], [2]])
