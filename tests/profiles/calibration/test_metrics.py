"""Figures of the report against loops."""

import pytest
import torch

from semkv.profiles.calibration import CalibrationSettings, losses
from semkv.profiles.calibration.contexts import SiteContext, Spans
from semkv.profiles.calibration.metrics import mass_at_cap, ratios, zoom_counts
from semkv.profiles.calibration.student import SiteTrace


@pytest.fixture
def settings():
    return CalibrationSettings(mined_mass=0.3, mined_share=0.9)


@pytest.fixture
def site():
    """Four query heads on two KV heads, three queries, five spans of 2 to 6 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([2, 6, 3, 5, 4])
    real = torch.arange(6) < lengths[:, None]
    raw = torch.rand(4, 3, 6, generator=generator) ** 3
    mass = (raw / raw.sum(-1, keepdim=True))[..., :5]
    none = torch.zeros(0)
    spans = Spans(none, none, none, real, torch.zeros(2, 5, 1), none, none, lengths.log(), none, none, none, none)
    return SiteContext(none, none, none, spans, none, mass)


def test_mass_at_cap_takes_spans_in_order_while_they_fit(site, settings):
    order = torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(1))
    _, mined = losses.zoom_targets(site.mass, settings)
    sizes = site.spans.real.sum(-1).tolist()
    kept = total = 0.0
    for head in range(4):
        group = [2 * (head // 2), 2 * (head // 2) + 1]
        for query in range(3):
            if not mined[head, query]:
                continue
            total += float(site.mass[head, query].sum())
            used = 0
            for span in sorted(range(5), key=lambda s: -max(float(order[g, query, s]) for g in group)):
                used += sizes[span]
                if used > 9:
                    break
                kept += float(site.mass[head, query, span])
    assert mass_at_cap(order, site, 9, settings) == pytest.approx((kept, total), rel=1e-5)
    assert total > 0


def test_no_order_catches_more_than_the_attention_when_spans_are_equal(site, settings):
    equal = site.spans.__class__(**{**vars(site.spans), "real": torch.ones(5, 4, dtype=torch.bool)})
    single = SiteContext(site.kept_k, site.kept_v, site.kept_positions, equal, site.q, site.mass[::2])
    best, total = mass_at_cap(single.mass, single, 8, settings)
    for seed in range(20):
        order = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(seed))
        assert mass_at_cap(order, single, 8, settings)[0] <= best + 1e-6
    assert 0 < best < total


def test_recall_and_precision_match_counts(site, settings):
    targets, mined = losses.zoom_targets(site.mass, settings)
    zoom = (torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(2)) > 0.5).float()
    gates = torch.full((2, 5, 3), 0.5)
    figures = ratios([zoom_counts(site, SiteTrace(zoom, gates, gates), settings)])
    hits = wanted = zoomed = 0
    for head in range(4):
        for query in range(3):
            for span in range(5):
                if mined[head, query]:
                    hits += bool(targets[head, query, span] and zoom[head, query, span])
                    wanted += bool(targets[head, query, span])
                    zoomed += bool(zoom[head, query, span])
    assert figures["recall"] == pytest.approx(hits / wanted)
    assert figures["precision"] == pytest.approx(hits / zoomed)
    assert figures["key_rank"] == pytest.approx(1.5)
    assert figures["zoom_rate"] == pytest.approx(float(zoom.mean()))
