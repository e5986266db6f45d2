"""Exact tokens in pages."""

from __future__ import annotations

import pytest
import torch

from semkv.ir.state_ops import EMPTY
from semkv.runtime.store.quantization import quantize
from semkv.runtime.store.token_store import TokenStore, plain


def tokens(count: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    base = torch.arange(first, first + count, dtype=torch.float32)
    k = base[None, :, None].expand(2, -1, 3) + torch.tensor([0.0, 0.5])[:, None, None]
    return k, k[..., :2] + 100, torch.arange(first, first + count)[None]


@pytest.fixture(params=["here", "elsewhere"])
def device(request, monkeypatch):
    """A CPU, and what is done on other devices."""
    if request.param == "elsewhere":
        monkeypatch.setattr("semkv.runtime.store.token_store._on_cpu", lambda x: False)


@pytest.mark.parametrize("reserve", [False, True])
@pytest.mark.parametrize("page", [1, 4, 8])
def test_appends_and_pops_like_a_list(page, reserve, device):
    store = TokenStore(*tokens(5), page, reserve=reserve)
    expected, newest = list(range(5)), 5
    for added, taken in ((1, 0), (3, 4), (0, 2), (9, 1), (1, 12), (6, 3)):
        store.append(*tokens(added, newest))
        expected, newest = expected + list(range(newest, newest + added)), newest + added
        if taken:
            k, v, positions = store.pop_front(taken)
            assert positions[0].tolist() == expected[:taken]
            assert torch.equal(k, tokens(taken, expected[0])[0])
            assert torch.equal(v, tokens(taken, expected[0])[1])
            expected = expected[taken:]
        assert store.length == len(expected)
        assert store.positions[0].tolist() == expected
        assert store.k[1, :, 0].tolist() == [place + 0.5 for place in expected]
        assert store.v[0, :, 1].tolist() == [place + 100 for place in expected]


def test_bytes_are_those_of_occupied_pages():
    store = TokenStore(*tokens(9), 8)
    each = 2 * 3 * 4 + 2 * 2 * 4 + 4
    assert store.nbytes == 16 * each
    assert store.reserved_nbytes == 0
    assert sum(x.untyped_storage().nbytes() for x in store.buffers) == store.nbytes
    store.pop_front(1)
    assert store.nbytes == 8 * each
    assert sum(x.untyped_storage().nbytes() for x in store.buffers) == store.nbytes
    assert TokenStore(*tokens(0), 8).nbytes == 0


def test_reserved_pages_are_counted_apart():
    store = TokenStore(*tokens(64), 8, reserve=True)
    store.append(*tokens(1, 64))
    each = 2 * 3 * 4 + 2 * 2 * 4 + 4
    assert store.nbytes == 72 * each
    assert store.reserved_nbytes == 8 * each
    before = store.buffers[0].data_ptr()
    store.append(*tokens(15, 65))
    assert store.buffers[0].data_ptr() == before


def test_a_clone_is_independent():
    store = TokenStore(*tokens(5), 4)
    copy = store.clone()
    copy.append(*tokens(1, 90))
    store.append(*tokens(1, 70))
    assert store.positions[0].tolist() == [0, 1, 2, 3, 4, 70]
    assert copy.positions[0].tolist() == [0, 1, 2, 3, 4, 90]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("page", [1, 8])
def test_in_codes_it_holds_the_codes_of_what_it_was_given(page, bits):
    """A scale per token and head beside them; what comes out at the front is quantised anew to the same codes."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 21, 6, generator=generator), torch.randn(2, 21, 4, generator=generator)
    k[1, 3] = 0
    where, codes_k, codes_v = torch.arange(21)[None], quantize(k, bits), quantize(v, bits)
    store = TokenStore(codes_k[:, :5], codes_v[:, :5], where[:, :5], page)
    assert store.token_nbytes == 2 * ((6 + 4) * bits // 8 + 4) + 4
    assert store.kv_nbytes == 2 * ((6 + 4) * bits // 8 + 4)
    for start in range(5, 21, 4):
        store.append(k[:, start : start + 4], v[:, start : start + 4], where[:, start : start + 4])
    assert torch.equal(store.k.codes, codes_k.codes)
    assert torch.equal(store.v.scale, codes_v.scale)
    assert store.nbytes == -(-21 // page) * page * store.token_nbytes
    assert sum(x.untyped_storage().nbytes() for x in store.buffers) == store.nbytes
    copy = store.clone()
    first_k, first_v, positions = store.pop_front(9)
    assert torch.equal(first_k, plain(codes_k)[:, :9])
    assert torch.equal(first_v, plain(codes_v)[:, :9])
    assert positions.tolist() == [list(range(9))]
    again = quantize(first_k, bits)
    assert torch.equal(again.codes, codes_k.codes[:, :9])
    assert torch.equal(again.scale, codes_k.scale[:, :9])
    assert (store.length, copy.length) == (12, 21)
    assert torch.equal(store.k.codes, codes_k.codes[:, 9:])
    assert set(copy.to_tensors()) == {"k", "k_scale", "v", "v_scale", "positions"}


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "codes", "scored"])
def test_what_stays_moves_to_the_front_of_the_same_buffers(kind, device):
    """Where pops leave the number of places as it is: behind the tokens are zeros, and positions that hide them."""
    k, v, positions = tokens(13)
    if kind == "bfloat16":
        k, v = k.bfloat16(), v.bfloat16()
    if kind == "codes":
        k, v = quantize(k, 8), quantize(v, 8)
    scores = torch.arange(26.0).view(2, 13) if kind == "scored" else None
    for taken in (1, 5, 11, 12):
        store = TokenStore(k, v, positions, 4, scores=scores)
        store.hold(7)
        before, held = store.tensors, dict(store.tensors)
        popped = store.pop_front(taken)
        assert store.tensors is before
        assert all(store.tensors[name] is x for name, x in held.items())
        expected = TokenStore(
            k[:, taken:], v[:, taken:], positions[:, taken:], 4, scores=None if scores is None else scores[:, taken:]
        )
        for name, x in expected.to_tensors().items():
            assert torch.equal(held[name][:, : 13 - taken], x)
            behind = held[name][:, 13 - taken :]
            assert torch.equal(behind, torch.full_like(behind, EMPTY if name == "positions" else 0))
        assert torch.equal(popped[0], plain(k[:, :taken]))
        assert torch.equal(popped[1], plain(v[:, :taken]))
        assert popped[2].tolist() == [list(range(taken))]
