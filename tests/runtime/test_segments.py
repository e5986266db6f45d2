"""Every token of a prompt is in exactly one part, and fixed parts stay within their room."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv.methods.paper_spans import PaperSpans
from semkv.methods.segmenters import SurprisalSpans
from semkv.runtime.store.segments import Boundary, Cut, Segmentation


def parts_of(division, n: int) -> list[int]:
    return sorted([*division.kept.tolist(), *division.folded.tolist(), *range(division.recent, n)])


@given(
    n=st.integers(1, 700),
    room=st.floats(24, 600),
    cost=st.floats(0.05, 1.5),
    page=st.sampled_from([1, 4, 8]),
    seed=st.integers(0, 9),
    entropy=st.booleans(),
    share=st.sampled_from([0.0, 0.2, 0.9]),
    spans=st.sampled_from([(1, 1), (4, 32), (8, 16), (16, 16)]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_budgeted_division(n, room, cost, page, seed, entropy, share, spans):
    surprisal = torch.rand(n, generator=torch.Generator().manual_seed(seed)) ** 4 * 9
    segmenter = SurprisalSpans(min_span=spans[0], max_span=spans[1], anchor_share=share, window=64, entropy=entropy)
    division = segmenter.divide(surprisal, room, cost, page)
    assert parts_of(division, n) == list(range(n))
    assert (division.lengths > 0).all()
    assert division.kept.tolist() == sorted(division.kept.tolist())
    assert division.starts.tolist() == sorted(division.starts.tolist())
    pages = [-(-count // page) * page for count in (len(division.kept), n - division.recent)]
    if len(division.lengths) > 1:
        assert sum(pages) + len(division.lengths) * cost <= room


def literal(surprisal: torch.Tensor, level: float, recent: int, first: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Sec. 3.1 with a loop: (exact tokens, spans) of tokens [first, recent), boundaries being from `level` on."""
    exact, spans, begin = list(range(first)), [], first
    for at in range(first, recent + 1):
        if at == recent or float(surprisal[at]) >= level:
            if at - begin < 16:
                exact += range(begin, at)
            else:
                spans.append((begin, at))
            exact += [at] if at < recent else []
            begin = at + 1
    return exact, spans


@given(
    n=st.integers(1, 500),
    seed=st.integers(0, 9),
    alpha=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    decimals=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_papers_division(n, seed, alpha, decimals):
    """With room for it: boundaries above mean + alpha * std are anchors and spans shorter than 16 stay exact."""
    surprisal = (torch.rand(n, generator=torch.Generator().manual_seed(seed)) ** 6 * 9).round(decimals=decimals)
    division = PaperSpans(alpha, max_span=1000, window=40, sinks=1).divide(surprisal, 1e9, 0.3, 8)
    assert division.recent == max(0, n - 40)
    limit = float(surprisal.mean() + alpha * surprisal.std(unbiased=False))
    above = min((float(x) for x in surprisal if float(x) > limit), default=float("inf"))
    exact, spans = literal(surprisal, above, division.recent, min(1, division.recent))
    assert division.kept.tolist() == exact
    assert [(a, a + b) for a, b in zip(division.starts.tolist(), division.lengths.tolist())] == spans
    assert division.boundary.alpha == alpha


@pytest.mark.parametrize(("room", "page"), [(120.0, 1), (200.0, 8), (420.0, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_alpha_rises_until_the_papers_division_fits(room, page, seed):
    """The lowest boundary of all that fit, by trying each."""
    surprisal = (torch.rand(900, generator=torch.Generator().manual_seed(seed)) ** 4 * 9).round(decimals=2)
    segmenter = PaperSpans(1.0, max_span=2000, window=16, sinks=1, window_share=1.0)
    division = segmenter.divide(surprisal, room, 0.8, page)
    left = room - segmenter.window_tokens(room, page) - 16 - page - (page - 1)

    def fits(level: float) -> bool:
        exact, spans = literal(surprisal, level, division.recent, 1)
        return len(exact) - 1 + 0.8 * len(spans) <= left

    limit = float(surprisal.mean() + surprisal.std(unbiased=False))
    tried = sorted({float(x) for x in surprisal[1 : division.recent] if float(x) > limit})
    lowest = next(level for level in tried if fits(level))
    exact, spans = literal(surprisal, lowest, division.recent, 1)
    assert (division.kept.tolist(), division.starts.tolist()) == (exact, [a for a, _ in spans])
    assert lowest > tried[0], "a budget that the literal constants do not fit"
    assert division.boundary.nats == lowest
    own = (lowest - float(surprisal.mean())) / float(surprisal.std(unbiased=False))
    assert own > 1.0
    assert division.boundary.alpha == pytest.approx(own, rel=1e-4)


def test_long_spans_of_the_paper_are_split():
    surprisal = torch.full((700,), 0.5)
    surprisal[[300, 420]] = torch.tensor([8.0, 0.6])
    division = PaperSpans(1.0, max_span=64, window=16, sinks=1).divide(surprisal, 200.0, 0.5, 1)
    assert int(division.lengths.max()) <= 96
    assert len(division.lengths) == -(-299 // 64) + -(-(684 - 301) // 64)
    assert division.kept.tolist() == [0, 300]
    assert 420 in division.starts.tolist()
    cramped = PaperSpans(1.0, max_span=64, window=16, sinks=1).divide(surprisal, 41.0, 2.0, 1)
    assert len(cramped.lengths) == 5, "longer where the summaries of so many would take the room"


def as_they_leave(
    segmenter, surprisal: torch.Tensor, level: float, places: int, chunk: int
) -> tuple[list[int], list[list[int]]]:
    """(exact tokens, tokens of each unit) of a text that leaves the window a chunk at a time."""
    exact, units, at = [], [], 0
    while len(surprisal) - at >= chunk:
        open_tokens = len(units[-1]) if units and units[-1][-1] == at - 1 else 0
        parts, goes_on = segmenter.cut(
            surprisal[at : at + chunk], Boundary(level, 1.0), open_tokens, places - len(exact)
        )
        assert 0 < parts.recent <= chunk
        assert parts_of(parts, parts.recent) == list(range(parts.recent))
        runs = [list(range(at + a, at + a + b)) for a, b in zip(parts.starts.tolist(), parts.lengths.tolist())]
        if goes_on and len(units[-1]) + len(runs[0]) <= segmenter.max_span:
            units[-1] += runs.pop(0)
        exact += [at + place for place in parts.kept.tolist()]
        units += runs
        at += parts.recent
    return exact, units


@given(n=st.integers(60, 300), seed=st.integers(0, 30), places=st.sampled_from([0, 7, 1000]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_generated_tokens_are_divided_like_a_prompt(n, seed, places):
    """By the paper: as one division of the whole text would, where there are places for exact tokens; none beyond them."""
    surprisal = torch.rand(n, generator=torch.Generator().manual_seed(seed)) ** 6 * 9
    exact, units = as_they_leave(PaperSpans(max_span=10_000), surprisal, 3.0, places, 16)
    assert len(exact) <= places
    done = max([*exact, *(unit[-1] for unit in units)]) + 1
    assert sorted([*exact, *(place for unit in units for place in unit)]) == list(range(done))
    if places == 1000:
        want, spans = literal(surprisal, 3.0, done, 0)
        if len(want) != len(exact):  # the last span may be cut short by the window
            assert set(exact) < set(want)
        assert [tuple(s) for s in spans if s[1] < done] == [(u[0], u[-1] + 1) for u in units if u[-1] + 1 < done]


def test_generated_tokens_are_divided_within_the_usual_lengths():
    surprisal = torch.rand(400, generator=torch.Generator().manual_seed(3)) ** 4 * 9
    segmenter = SurprisalSpans(min_span=4, max_span=16)
    exact, units = as_they_leave(segmenter, surprisal, 4.0, 9, 8)
    assert len(exact) == 9
    assert max(map(len, units)) <= 16
    begins = [unit[0] for unit in units]
    sharp = {place for place in range(400) if float(surprisal[place]) >= 4.0}
    assert {begin for begin in begins if begin in sharp}, "spans begin where the text surprises"
    for before, unit in pairwise(units):
        told = unit[0] in sharp or unit[0] - 1 in set(exact)
        assert told or len(before) == 16, "only there, or where they are full"
    assert all(place in sharp for place in exact)
    never, _ = as_they_leave(SurprisalSpans(anchor_share=0.0), surprisal, 4.0, 9, 8)
    assert never == []


def test_boundaries_lie_where_the_text_surprises():
    surprisal = torch.full((200,), 0.5)
    surprisal[[40, 90, 130]] = 8.0
    division = SurprisalSpans(min_span=4, max_span=100, window=16, sinks=0, anchor_share=0.2).divide(
        surprisal, 120.0, 0.5, 1
    )
    assert {40, 90, 130} <= set(division.kept.tolist())
    assert {41, 91, 131} <= set(division.starts.tolist())


def cut_of(lengths: list[int], units: torch.Tensor | None = None) -> Cut:
    n = sum(lengths)
    surprisal = torch.randn(n, generator=torch.Generator().manual_seed(n)).abs()
    return Cut(torch.arange(n), surprisal, torch.tensor(lengths), units)


def test_weights_of_a_span_are_its_share_of_surprisal():
    """Eq. 2, with loops; a span without surprisal is weighted uniformly."""
    made = replace(cut_of([2, 2, 1]), surprisal=torch.tensor([1.0, 3.0, 0.0, 0.0, 2.0]))
    weights = made.surprisal_weights
    assert weights.tolist() == [[0.25, 0.75, 0.5, 0.5, 1.0]]
    assert made.token_unit.tolist() == [[0, 0, 1, 1, 2]]
    assert made.sizes.tolist() == [[2, 2, 1]]
    x = torch.randn(2, 5, 3)
    expected = torch.stack((x[:, 0] * 0.25 + x[:, 1] * 0.75, (x[:, 2] + x[:, 3]) / 2, x[:, 4]), 1)
    torch.testing.assert_close(made.mean(x, weights), expected)


@given(seed=st.integers(0, 99), per_head=st.booleans())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_units_of_scattered_segments_are_reduced_as_loops_do(seed, per_head):
    """Units need not be runs, and heads may group their tokens differently; query heads share their KV head's units."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 4, (7,), generator=generator).tolist()
    rows = 2 if per_head else 1
    units = torch.stack([torch.randperm(7, generator=generator) % 3 for _ in range(rows)])
    made = cut_of(lengths, units)
    x = torch.randn(4, sum(lengths), 3, generator=generator)  # of query heads, two per KV head
    owner = [place for place, length in enumerate(lengths) for _ in range(length)]
    found = {"mean": made.mean(x), "smallest": made.smallest(x), "largest": made.largest(x)}
    for head in range(4):
        own = units[head // 2 if per_head else 0]
        for unit in range(3):
            members = [token for token, segment in enumerate(owner) if own[segment] == unit]
            assert int(made.sizes[head // 2 if per_head else 0, unit]) == len(members)
            torch.testing.assert_close(found["mean"][head, unit], x[head, members].mean(0))
            torch.testing.assert_close(found["smallest"][head, unit], x[head, members].amin(0))
            torch.testing.assert_close(found["largest"][head, unit], x[head, members].amax(0))


def test_a_division_of_leaving_tokens_folds_them_all():
    division = Segmentation.of_lengths(torch.tensor([3, 1, 4]))
    assert division.folded.tolist() == list(range(8))
    assert division.recent == 8
    assert not len(division.kept)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    tokens=st.integers(1, 60),
    own=st.sampled_from(["none", "runs", "heads alike", "mixed"]),
    seed=st.integers(0, 9),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_blocks_are_whole_units_in_order(lengths, tokens, own, seed):
    generator = torch.Generator().manual_seed(seed)
    units = None
    if own != "none":
        steps = torch.randint(0, 2, (len(lengths),), generator=generator)
        steps[0] = 0
        units = steps.cumsum(0)[None]
    if own == "heads alike":
        units = units.expand(2, -1)
    if own == "mixed":
        units = torch.cat([units, units[:, torch.randperm(len(lengths), generator=generator)]])
    division = replace(Segmentation.of_lengths(torch.tensor(lengths)), units=units)
    blocks = list(division.blocks(tokens))
    assert torch.cat([block.folded for block in blocks]).tolist() == division.folded.tolist()
    if units is None:
        assert all(block.units is None for block in blocks)
    else:
        base, got = 0, []
        for block in blocks:
            assert [row.unique().tolist() for row in block.units] == [list(range(int(block.units.max()) + 1))] * len(
                units
            )
            got.append(block.units + base)
            base += int(block.units.max()) + 1
        assert torch.equal(torch.cat(got, 1), units)
    if own in ("none", "runs", "heads alike"):
        longest = (
            max(lengths)
            if units is None
            else int(torch.zeros(int(units.max()) + 1).long().scatter_add_(0, units[0], torch.tensor(lengths)).max())
        )
        assert max(int(block.lengths.sum()) for block in blocks) < tokens + 2 * longest


def test_without_segments_there_is_no_block():
    assert list(Segmentation.of_lengths(torch.tensor([], dtype=torch.int64)).blocks(8)) == []
