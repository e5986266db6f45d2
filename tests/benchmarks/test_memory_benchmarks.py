"""The benchmarks of memory: what they measure with, and what they make of their figures."""

from __future__ import annotations

import pytest
import torch

MIB = 1 << 20
ENVIRONMENT = {
    "machine": "a machine",
    "threads": 1,
    "cpus": 2,
    "versions": {"torch": "2"},
    "commit": "0",
    "started": "now",
    "command": "a command",
}


@pytest.fixture
def scripts(monkeypatch, tmp_path):
    """(resident_memory, long_generation), whose pages go to a temporary folder."""
    from benchmarks.lib import grids
    from benchmarks.speed import long_generation, resident_memory

    monkeypatch.setattr(grids, "DOCS", tmp_path)
    return resident_memory, long_generation


def test_a_peak_sees_what_is_gone_at_the_end(scripts):
    with scripts[0].Peak() as peak:
        x = torch.ones(64 * MIB, dtype=torch.uint8)
        float(x[-1])
        torch.zeros(2000, 2000) @ torch.zeros(2000, 2000)  # long enough for a sample
        del x
    assert peak.bytes - peak.before > 60 * MIB


def row(tokens: int, **changes) -> dict:
    return {
        "claim": "decode",
        "name": "sekv",
        "budget": 0.1,
        "tokens": tokens,
        "making": 1000 + tokens,
        "made": 900 + tokens // 4,
        "peak": 950 + tokens // 2,
        "full": 8 * tokens,
        **changes,
    }


def test_growth_is_a_share_of_the_full_cache(scripts):
    rows = [row(800), row(8000), row(800, budget=4096), row(8000, budget=4096, peak=1350), row(8000, name="full")]
    found = scripts[0].growths(rows)
    assert [(x["name"], x["budget"], x["tokens"]) for x in found] == [
        ("sekv", 0.1, [800, 8000]),
        ("sekv", 4096, [800, 8000]),
    ]
    assert found[0]["peak"] == pytest.approx(3600 / 57600)
    assert found[0]["made"] == pytest.approx(1800 / 57600)
    assert found[1]["peak"] == 0


def test_a_prefill_may_take_a_layer_beside_its_share(scripts):
    cell = {"before": 100, "peak": 160, "layer": 50, "full": 100}
    assert scripts[0].excess(cell) == pytest.approx(0.1)


def test_pages_hold_every_row(scripts, tmp_path):
    resident, long = scripts
    rows = [row(800) | {"commit": "aaa"}, row(8000) | {"commit": "bbb"}]
    rows.append(
        {
            "claim": "prefill",
            "model": "decoder",
            "name": "sketch",
            "budget": 0.1,
            "tokens": 16_384,
            "before": 500 * MIB,
            "peak": 600 * MIB,
            "after": 510 * MIB,
            "layer": 50 * MIB,
            "full": 400 * MIB,
            "commit": "aaa",
        }
    )
    wanted = [{"claim": "decode", "name": "sekv", "budget": 0.1, "tokens": tokens} for tokens in (8000, 16_000)]
    path = resident.page(
        {
            "environment": ENVIRONMENT,
            "steps": 4,
            "rows": rows,
            "growth": resident.growths(rows),
            "lacking": resident.lacking(wanted, rows),
        }
    )
    text = path.read_text(encoding="utf-8")
    assert "Not measured yet: decode with `sekv`, 16,000 tokens, 10 %.\n" in text
    assert path.parent == tmp_path
    assert "| `sekv` | 10 % | 6.2 | 3.1 | 12.5 |" in text
    assert "| `sketch` | 8 layers | 16,384 | 400 | 50 | 100 | 12.5 |" in text
    assert text.rstrip().endswith("Commits of the rows: aaa, bbb.")
    rows = [
        {
            "method": "sekv",
            "generated": 20_000,
            "median_ms": 12.34,
            "busy_ms": 9.87,
            "peak_share": 0.998,
            "host": 80 * MIB,
            "host_per_token": 2128.0,
            "anonymous": 600 * MIB,
            "tensors": 321,
            "threads": 1,
        }
    ]
    held = dict.fromkeys(("budget", "host", "tensors", "tensor_bytes", "threads"), True)
    claims = [
        {
            "method": "sekv",
            "generated": 20_000,
            "ratio": None,
            "busy_ratio": None,
            "largest_peak_share": 0.998,
            "held": {"budget": True, "time": None, **held},
        }
    ]
    text = long.page({"environment": ENVIRONMENT, "rows": rows, "claims": claims}).read_text(encoding="utf-8")
    assert "| `sekv` | 20,000 | 12.3 | 9.9 | 99.8 | 80 | 2128.0 | 600 | 321 | 1 |" in text
    assert "| `sekv` | 20,000 | - | - | 99.8 | yes | not said | yes | yes | yes | yes |" in text


def test_live_tensors_are_counted_once_per_storage(scripts):
    count, nbytes = scripts[1].live_tensors()
    held = torch.zeros(MIB, dtype=torch.uint8)
    views = [held[:10], held[5:]]
    after, more = scripts[1].live_tensors()
    assert after - count == 3
    assert more - nbytes == MIB
    del held, views
    assert scripts[1].live_tensors() == (count, nbytes)
