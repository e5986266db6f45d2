"""The host tier: tokens and factors, in memory and in a mapped file, against plain lists."""

from __future__ import annotations

import pytest
import torch

from semkv.runtime.host import pool as host_pool
from semkv.runtime.host.pool import GrowingTensor, HostFactors, HostTokens
from semkv.runtime.host.tier import HostTier


@pytest.mark.parametrize("disk", [False, True])
def test_growing_keeps_what_is_there(disk):
    grown = GrowingTensor(2, (3,), torch.float32, tier=HostTier(disk=disk))
    parts = [torch.randn(2, count, 3) for count in (0, 1, 7, 2, 40)]
    for part in parts:
        grown.append(part)
    assert torch.equal(grown.data, torch.cat(parts, 1))
    assert grown.nbytes == 2 * 50 * 3 * 4
    assert grown.disk_nbytes == (grown.nbytes if disk else 0)
    copy = grown.clone()
    copy.append(torch.zeros(2, 1, 3))
    copy.data[:, 0] = 7
    assert torch.equal(grown.data, torch.cat(parts, 1))


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("form", ["raw", "int8", "int4"])
def test_tokens_by_place(form, disk):
    torch.manual_seed(0)
    pool = HostTokens(2, 5, 3, torch.float16, form, tier=HostTier(disk=disk))
    k, v = torch.randn(2, 30, 5).half(), torch.randn(2, 30, 3).half()
    pool.append(k[:, :11], v[:, :11])
    pool.append(k[:, 11:], v[:, 11:])
    index = torch.tensor([[3, 29, 0, 3], [11, 10, 12, 28]])
    got_k, got_v = pool.gather(index)
    tolerance = {"raw": 0, "int8": 0.02, "int4": 0.3}[form]
    for head in range(2):
        torch.testing.assert_close(got_k[head], k[head, index[head]], rtol=0, atol=tolerance)
        torch.testing.assert_close(got_v[head], v[head, index[head]], rtol=0, atol=tolerance)
    heads = torch.tensor([1, 0, 1])
    flat_k, _ = pool.gather(torch.tensor([10, 3, 28]), heads)
    assert torch.equal(flat_k, torch.stack((got_k[1, 1], got_k[0, 0], got_k[1, 3])))
    assert pool.length == 30
    assert pool.nbytes == 2 * 30 * pool.token_nbytes
    assert pool.token_nbytes == {"raw": (5 + 3) * 2, "int8": 5 + 3 + 4, "int4": 3 + 2 + 4}[form]
    assert torch.equal(pool.keys(1, index[1]), got_k[1])


@pytest.mark.parametrize("in_cpp", [False, True])
@pytest.mark.parametrize("count", [0, 1, 4, 5])
@pytest.mark.parametrize("form", ["raw", "int8"])
def test_rows_are_filled_in_pieces(monkeypatch, form, count, in_cpp):
    monkeypatch.setattr(host_pool, "PIECE", 2)
    if not in_cpp:
        monkeypatch.setattr(host_pool, "copies_tokens", lambda *_: False)
    generator = torch.Generator().manual_seed(count)
    pool = HostTokens(2, 5, 3, torch.float32, form)
    pool.append(*(torch.randn(2, 30, dim, generator=generator) for dim in (5, 3)))
    heads, places = (torch.randint(0, n, (count,), generator=generator) for n in (2, 30))
    at = torch.randperm(9, generator=generator)[:count]
    k, v = (torch.full((9, dim), float("nan")) for dim in (5, 3))
    pool.fill((k, v), at, places, heads, threads=1)
    for room, x in zip((k, v), pool.gather(places, heads)):
        assert torch.equal(room[at], x)
        assert int(room.isnan().any(1).sum()) == 9 - count


RANKS = [[(2, 3), (1, 1), (4, 2)], [(1, 2), (3, 3), (2, 4)]]
LENGTHS = [5, 2, 9]


@pytest.fixture
def factors() -> tuple[HostFactors, list[list[dict[str, torch.Tensor]]]]:
    """Three spans of two heads with ranks of their own, stored in two parts."""
    torch.manual_seed(0)
    spans = [
        [
            {
                "key_u": torch.randn(length, rk),
                "key_s": torch.rand(rk),
                "key_v": torch.randn(6, rk),
                "value_u": torch.randn(length, rv),
                "value_s": torch.rand(rv),
                "value_v": torch.randn(4, rv),
            }
            for (rk, rv), length in zip(row, LENGTHS)
        ]
        for row in RANKS
    ]
    pool = HostFactors(2, 6, 4, torch.float32)
    pool.append([row[:1] for row in spans], torch.tensor(LENGTHS[:1]))
    pool.append([row[1:] for row in spans], torch.tensor(LENGTHS[1:]))
    return pool, spans


def test_factors_of_ragged_spans(factors):
    """Each head asks for spans of its own; what is padded is zero."""
    pool, spans = factors
    chosen = torch.tensor([[2, 0], [1, -1]])
    got = pool.gather(chosen)
    assert got["key_u"].shape == (2, 2, 9, 4)
    for head in range(2):
        for place in range(2):
            span = int(chosen[head, place])
            for kind in HostFactors.KINDS:
                padded = got[kind][head, place]
                own = spans[head][span][kind] if span >= 0 else torch.zeros([0] * padded.dim())
                inside = padded[tuple(slice(size) for size in own.shape)]
                assert torch.equal(inside, own)
                assert padded.abs().sum() == pytest.approx(float(own.abs().sum()), rel=1e-6)


def test_spans_that_are_skipped_are_not_read(factors):
    pool, _ = factors
    chosen = torch.tensor([[2, 0], [1, 0]])
    whole = pool.gather(chosen)
    part = pool.gather(chosen, skip=torch.tensor([[True, False], [False, True]]))
    for kind in HostFactors.KINDS:
        assert part[kind].shape == whole[kind].shape
        assert not part[kind][0, 0].any()
        assert not part[kind][1, 1].any()
        assert torch.equal(part[kind][0, 1], whole[kind][0, 1])


def test_bytes_of_factors(factors):
    pool, spans = factors
    for head in range(2):
        for span in range(3):
            own = sum(x.nbytes for x in spans[head][span].values())
            assert int(pool.span_nbytes()[head, span]) == own
    tables = 8 * (6 + 2 * 6 + 3)
    assert pool.nbytes == int(pool.span_nbytes().sum()) + tables


def test_a_clone_of_factors_is_independent(factors):
    pool, spans = factors
    copy = pool.clone()
    copy.append([row[:1] for row in spans], torch.tensor(LENGTHS[:1]))
    assert (pool.spans, copy.spans) == (3, 4)
    for kind, x in pool.gather(torch.tensor([[0], [0]])).items():
        assert torch.equal(x, copy.gather(torch.tensor([[3], [3]]))[kind])
