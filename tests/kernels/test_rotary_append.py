"""Rotary embedding and append: the reference against transformers' own, Triton against the reference."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from semkv.errors import InputError
from semkv.kernels.rotary_append import rotary_append_reference

SLOT = torch.tensor([[3, 0, -1], [7, 5, 1]])


def made(dim: int, turned: int, value_dim: int, dtype: torch.dtype, place_heads: int = 1) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(dim)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    angle = 6 * torch.rand(2, 3, turned // 2, generator=generator)
    where = torch.tensor([[10, 11, 12], [4, 5, 6]])
    pool = numbers(2, 9, dim), numbers(2, 9, value_dim), torch.zeros(place_heads, 9, dtype=torch.int32)
    return (
        numbers(2, 4, 3, dim),
        numbers(2, 2, 3, dim),
        numbers(2, 2, 3, value_dim),
        angle.cos(),
        angle.sin(),
        where,
        SLOT,
        *pool,
    )


def test_the_reference_is_the_rotation_of_transformers():
    q, k, *rest = made(12, 12, 12, torch.float32)
    cos, sin = torch.cat((rest[1], rest[1]), -1), torch.cat((rest[2], rest[2]), -1)
    wanted_q, wanted_k = apply_rotary_pos_emb(q, k, cos, sin)
    before = rest[5].clone()
    torch.testing.assert_close(rotary_append_reference(q, k, *rest), wanted_q)
    torch.testing.assert_close(rest[5][:, 7], wanted_k[1, :, 0])
    assert torch.equal(rest[6][:, 5], rest[0][1, :, 1])
    assert rest[7][0].tolist() == [11, 6, 0, 10, 0, 5, 0, 4, 0]
    untouched = [2, 4, 6, 8]
    assert torch.equal(rest[5][:, untouched], before[:, untouched])


def test_neighbouring_pairs_are_the_other_layout():
    x = made(12, 12, 12, torch.float32)
    order = torch.arange(12).view(2, 6).T.flatten()  # (i, i + 6) side by side
    q = rotary_append_reference(*x[:7], *(part.clone() for part in x[7:]))
    paired = rotary_append_reference(
        x[0][..., order], x[1][..., order], *x[2:7], *(part.clone() for part in x[7:]), interleaved=True
    )
    assert torch.equal(paired, q[..., order])


@pytest.mark.parametrize(
    ("dim", "turned", "value_dim", "dtype", "place_heads", "interleaved"),
    [
        (60, 60, 60, torch.float32, 1, False),
        (64, 20, 15, torch.float16, 2, True),  # part of the dimensions
        (128, 128, 128, torch.bfloat16, 1, False),
    ],
)
def test_the_kernel_equals_the_reference(on_device, dim, turned, value_dim, dtype, place_heads, interleaved):
    """What is moved is the same bits; the error of what is turned is at most twice the reference's against float64."""
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.rotary_append.triton import rotary_append_triton

    x = made(dim, turned, value_dim, dtype, place_heads)
    own, exact = ([part.clone() for part in x] for _ in range(2))
    exact = [part.double() if part.is_floating_point() else part for part in exact]
    plain = rotary_append_reference(*own, interleaved=interleaved), *own[7:]
    wide = rotary_append_reference(*exact, interleaved=interleaved), *exact[7:]
    got = on_device(rotary_append_triton, *x, interleaved=interleaved)
    for mine, theirs, true in zip(got[:2], plain[:2], wide[:2]):
        assert mine.dtype == dtype
        assert (mine - true).abs().max() <= 2 * (theirs - true).abs().max()
    untouched = [2, 4, 6, 8]
    assert torch.equal(got[1][:, untouched], x[7][:, untouched])
    assert torch.equal(got[2], plain[2])
    assert torch.equal(got[3], plain[3])


def test_what_cannot_be_launched_is_refused():
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.rotary_append.triton import rotary_append_launches

    x = list(made(12, 16, 12, torch.float32))
    with pytest.raises(InputError, match="cos turns 16 dimensions of heads that have 12"):
        rotary_append_launches(*x)
    x = list(made(12, 12, 12, torch.float32))
    x[8] = x[8][:, :, ::2]
    with pytest.raises(InputError, match="pool_v is not contiguous"):
        rotary_append_launches(*x)
