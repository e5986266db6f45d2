"""StreamingLLM's sinks and SnapKV's votes, against loops."""

from __future__ import annotations

import math

import pytest
import torch

from semkv.errors import ConfigError
from semkv.ir.site import AttentionSite
from semkv.methods import METHODS, find_method
from semkv.methods.keepers import ObservationWindow, Sinks
from semkv.runtime.prompt.record import RowRecord

SITE = AttentionSite(index=0, name="layer", store=0, q_heads=4, kv_heads=2, key_dim=6, value_dim=6, scale=0.4)


def record(n: int, seed: int = 0) -> RowRecord:
    generator = torch.Generator().manual_seed(seed)
    out = RowRecord(ids=torch.zeros(n, dtype=torch.int64))
    out.keys[0] = torch.randn(2, n, 6, generator=generator)
    out.queries[0] = torch.randn(4, min(n, 64), 6, generator=generator)
    return out


def votes(of: RowRecord, window: int, kernel: int, pool: str) -> list[list[float]]:
    """SnapKV Sec. 3 with loops: per KV head, the pooled attention mass of the window's queries on what is before it."""
    k, q = of.keys[0], of.queries[0]
    n, observed = k.shape[1], min(window, q.shape[1])
    out = []
    for head in range(2):
        mass = [0.0] * (n - window)
        for member in (2 * head, 2 * head + 1):
            for query in range(observed):
                at = n - observed + query
                scores = [
                    float(q[member, q.shape[1] - observed + query] @ k[head, j]) * SITE.scale for j in range(at + 1)
                ]
                total = sum(math.exp(score) for score in scores)
                for j in range(n - window):
                    mass[j] += math.exp(scores[j]) / total / 2
        half = kernel // 2
        near = [mass[max(0, j - half) : j + half + 1] for j in range(len(mass))]
        out.append([max(part) if pool == "max" else sum(part) / kernel for part in near])
    return out


@pytest.mark.parametrize(("kernel", "pool"), [(1, "max"), (5, "max"), (3, "mean")])
@pytest.mark.parametrize("n", [40, 90])
def test_snapkv_keeps_what_the_window_looks_at(kernel, pool, n):
    keeper, of = ObservationWindow(8, kernel, pool), record(n)
    scores = keeper.scores(SITE, of, 8)
    expected = torch.tensor(votes(of, 8, kernel, pool))
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)
    kept, recent = keeper.keep(SITE, of, room=32, page_size=8)
    assert recent == n - 8
    assert kept.shape == (2, 24)
    for head in range(2):
        assert kept[head].tolist() == sorted(kept[head].tolist())
        chosen = expected[head, kept[head]]
        others = expected[head].clone()
        others[kept[head]] = -1
        assert float(chosen.min()) >= float(others.max()) - 1e-6


@pytest.mark.parametrize(
    ("n", "room", "window", "kept"),
    [
        (200, 128, 32, 96),  # the paper's window
        (200, 48, 24, 24),  # half of the room
        (200, 24, 8, 16),  # at least a page
        (30, 128, 30, 0),  # everything fits in the window
        (40, 128, 32, 8),  # everything fits
    ],
)
def test_snapkvs_window_shrinks_with_the_budget(n, room, window, kept):
    index, recent = ObservationWindow().keep(SITE, record(n), room, 8)
    assert (n - recent, index.shape[1]) == (window, kept)


@pytest.mark.parametrize(
    ("n", "room", "first", "recent"), [(100, 40, 4, 68), (100, 16, 4, 92), (20, 400, 4, 4), (3, 24, 3, 3)]
)
def test_streaming_keeps_the_first_and_the_newest(n, room, first, recent):
    kept, start = Sinks(4).keep(SITE, record(n), room, 8)
    assert kept.tolist() == list(range(first))
    assert start == recent


def test_parameters_are_checked():
    with pytest.raises(ConfigError, match="window 65: the observation window has 1 to 64 queries"):
        ObservationWindow(65)
    with pytest.raises(ConfigError, match="kernel 4: the pooling width is odd and positive"):
        ObservationWindow(kernel=4)
    with pytest.raises(ConfigError, match="unknown method 'pages'; there are: full, streaming_llm, snapkv, sekv"):
        find_method("pages")
    with pytest.raises(ConfigError, match=r"method 'full' has no option 'sinks' \(it has: none\)"):
        find_method("full", {"sinks": 4})


def test_methods_are_found_by_name():
    assert list(METHODS)[:4] == ["full", "streaming_llm", "snapkv", "sekv"]
    assert all(name == method.name for name, method in METHODS.items())
    assert find_method("streaming_llm", {"sinks": 2}).sinks == 2
    assert not METHODS["full"].compresses
    assert all(METHODS[name].minimum_tokens > 0 for name in METHODS if METHODS[name].compresses)
