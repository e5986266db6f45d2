"""Every token of a prompt is in exactly one part, and fixed parts stay within their room."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv.errors import BudgetError
from semkv.methods.segmenters import LiteralSpans, SurprisalSpans
from semkv.runtime.segments import Folding, Segmentation


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


@given(n=st.integers(1, 500), seed=st.integers(0, 9), alpha=st.sampled_from([0.5, 1.0, 3.0]))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_literal_division(n, seed, alpha):
    """Boundaries above mean + alpha * std and spans shorter than 16 stay exact (Sec. 3.1)."""
    surprisal = torch.rand(n, generator=torch.Generator().manual_seed(seed)) ** 6 * 9
    division = LiteralSpans(alpha, 16, window=40).divide(surprisal, float("inf"), 0.3, 8)
    assert parts_of(division, n) == list(range(n))
    assert division.recent == max(0, n - 40)
    assert (division.lengths >= 16).all()
    boundary = surprisal > surprisal.mean() + alpha * surprisal.std(unbiased=False)
    assert not boundary[division.folded].any()


def test_the_literal_constants_do_not_fit_a_small_budget():
    surprisal = torch.rand(2000, generator=torch.Generator().manual_seed(0)) ** 4
    with pytest.raises(
        BudgetError, match=r"hold \d+ anchors and short spans of 2000 tokens: \d+ tokens .* has 60 .* literal=False"
    ):
        LiteralSpans().divide(surprisal, 60.0, 0.3, 8)


def test_boundaries_lie_where_the_text_surprises():
    surprisal = torch.full((200,), 0.5)
    surprisal[[40, 90, 130]] = 8.0
    division = SurprisalSpans(min_span=4, max_span=100, window=16, sinks=0, anchor_share=0.2).divide(
        surprisal, 120.0, 0.5, 1
    )
    assert {40, 90, 130} <= set(division.kept.tolist())
    assert {41, 91, 131} <= set(division.starts.tolist())


def folding(lengths: list[int], units: torch.Tensor | None = None, heads: int = 2) -> Folding:
    n = sum(lengths)
    generator = torch.Generator().manual_seed(n)
    k, v, surprisal = (torch.randn(heads, n, 3, generator=generator) for _ in range(3))
    return Folding(k, v, torch.arange(n), surprisal[0, :, 0].abs(), torch.tensor(lengths), units)


def test_weights_of_a_span_are_its_share_of_surprisal():
    """Eq. 2, with loops; a span without surprisal is weighted uniformly."""
    made = replace(folding([2, 2, 1]), surprisal=torch.tensor([1.0, 3.0, 0.0, 0.0, 2.0]))
    weights = made.surprisal_weights()
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
    made = folding(lengths, units)
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
