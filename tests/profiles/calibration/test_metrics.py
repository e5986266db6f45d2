"""Figures of the report against loops."""

import dataclasses

import pytest
import torch

from semkv.profiles.calibration import CalibrationSettings, losses
from semkv.profiles.calibration.contexts import SiteRecord, mass_of
from semkv.profiles.calibration.metrics import direction_scores, mass_at_cap, shares, zoom_counts

SIZES = (2, 6, 3, 5, 4)


@pytest.fixture
def settings():
    return CalibrationSettings(mined_mass=0.3, mined_share=0.9)


@pytest.fixture
def record():
    """Four query heads on two KV heads, three queries, five spans of 2 to 6 tokens and four tokens in none."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(SIZES)
    span = torch.cat([torch.arange(5).repeat_interleave(lengths), torch.full((4,), -1)])
    raw = torch.rand(4, 3, 24, generator=generator) ** 3
    far = torch.tensor([[True, True, True, False, False], [True] * 5, [True] * 5])
    none = torch.zeros(0)
    values = {field.name: none for field in dataclasses.fields(SiteRecord)}
    values |= {
        "share": raw / raw.sum(-1, keepdim=True),
        "span": span,
        "lengths": lengths,
        "ends": lengths.cumsum(0) - 1,
        "far": far,
        "where": torch.tensor([18, 23, 23]),
        "q": torch.randn(4, 3, 8, generator=generator),
        "mean_k": torch.randn(2, 5, 8, generator=generator),
    }
    return SiteRecord(**values)


def mass_and_mined(record, settings):
    mass = mass_of(record.share, record.span, record.far)
    return mass, *losses.zoom_targets(mass, record.far, settings)


def test_mass_at_cap_takes_far_spans_in_order_while_they_fit(record, settings):
    order = torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(1))
    mass, _, mined = mass_and_mined(record, settings)
    kept = total = 0.0
    for head in range(4):
        group = [2 * (head // 2), 2 * (head // 2) + 1]
        for query in range(3):
            if not mined[head, query]:
                continue
            total += float(mass[head, query].sum())
            used = 0
            spans = [s for s in range(5) if record.far[query, s]]
            for span in sorted(spans, key=lambda s: -max(float(order[g, query, s]) for g in group)):
                used += SIZES[span]
                if used > 0.4 * (int(record.where[query]) + 1):
                    break
                kept += float(mass[head, query, span])
    assert mass_at_cap(order, record, 0.4, settings) == pytest.approx((kept, total), rel=1e-5)
    assert 0 < kept < total


def test_the_direction_of_the_mean_key_is_what_the_router_coarse_reads(record):
    scores = direction_scores(record)
    for head in range(4):
        for span in range(5):
            key = record.mean_k[head // 2, span]
            expected = record.q[head] @ key / key.norm()
            torch.testing.assert_close(scores[head, :, span], expected)


class Fixed:
    def __init__(self, margins):
        self.fixed = margins

    def margins(self, record):
        return self.fixed


def test_recall_and_precision_match_counts(record, settings):
    _, targets, mined = mass_and_mined(record, settings)
    margins = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(2))
    figures = shares(
        [zoom_counts(Fixed(margins), record, settings) | {"caught": 1, "coarse": 1, "oracle": 2, "mass": 4}]
    )
    hits = wanted = zoomed = everywhere = 0
    for head in range(4):
        for query in range(3):
            for span in range(5):
                opened = bool(margins[head, query, span] > 0 and record.far[query, span])
                everywhere += opened
                if mined[head, query]:
                    hits += bool(targets[head, query, span] and opened)
                    wanted += bool(targets[head, query, span])
                    zoomed += opened
    assert figures["recall"] == pytest.approx(hits / wanted)
    assert figures["precision"] == pytest.approx(hits / zoomed)
    assert figures["zoom_rate"] == pytest.approx(everywhere / (4 * 13))
    assert (figures["caught"], figures["oracle"]) == (0.25, 0.5)
