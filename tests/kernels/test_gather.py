"""Waiting tokens to slots: the reference against the runtime's own codes, Triton and C++ against the reference, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from semkv.errors import InputError
from semkv.kernels.cpp import compiler
from semkv.kernels.gather import copy_tokens_reference
from semkv.kernels.gather.cpp import copies_tokens, copy_tokens_cpp
from semkv.runtime.host.pool import HostTokens
from semkv.runtime.host.tier import HostTier
from semkv.runtime.store.quantization import Quantized, dequantize, quantize

HEADS, TOKENS, SLOTS = 3, 301, 400
KINDS = [torch.float32, torch.bfloat16, torch.float16, "codes", "codes of keys"]
"""How keys and values wait."""


def in_file(x: torch.Tensor, path: Path) -> torch.Tensor:
    """A copy in a mapped file."""
    mapped = torch.from_file(str(path), shared=True, size=x.numel(), dtype=x.dtype).view(x.shape)
    return mapped.copy_(x)


@dataclass
class Case:
    """Waiting tokens of random numbers, NaN slots, and where `count` tokens go."""

    waiting: list[torch.Tensor]
    scales: list[torch.Tensor | None]
    into: list[torch.Tensor]
    where: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, stored: torch.dtype | str, dims: tuple[int, int], count: int, dtype: torch.dtype | None = None) -> Case:
        generator = torch.Generator().manual_seed(count)
        waiting: list[torch.Tensor] = []
        scales: list[torch.Tensor | None] = []
        dtype = dtype or (stored if isinstance(stored, torch.dtype) else torch.float32)
        for name, size in (("keys", dims[0]), ("values", dims[1])):
            x = torch.randn(HEADS, TOKENS, size, generator=generator)
            coded = quantize(x, 8) if stored == "codes" or (stored == "codes of keys" and name == "keys") else None
            waiting.append(x.to(dtype) if coded is None else coded.codes)
            scales.append(None if coded is None else coded.scale)
        into = [torch.full((SLOTS, size), float("nan"), dtype=dtype) for size in dims]
        head, place = (torch.randint(0, n, (count,), generator=generator) for n in (HEADS, TOKENS))
        return cls(waiting, scales, into, (head, place, torch.randperm(SLOTS, generator=generator)[:count]))

    def wanted(self) -> list[torch.Tensor]:
        """The slots by the reference."""
        into = [x.clone() for x in self.into]
        copy_tokens_reference(self.waiting, self.scales, into, *self.where)
        return into


def equal(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Bit for bit, NaN where nothing was written."""
    return all(torch.equal(x.nan_to_num(777), y.nan_to_num(777)) for x, y in zip(found, wanted))


@pytest.mark.parametrize("stored", KINDS)
def test_the_reference_reads_what_the_runtime_stores(stored):
    case = Case.of(stored, (15, 60), 40)
    heads, places, at = case.where
    for x, scale, slots in zip(case.waiting, case.scales, case.wanted()):
        plain = x if scale is None else dequantize(Quantized(x, scale, 8, x.shape[2]))
        assert torch.equal(slots[at], plain[heads, places].to(slots.dtype))
        others = torch.ones(SLOTS, dtype=torch.bool).index_fill_(0, at, False)
        assert slots[others].isnan().all()


@pytest.mark.parametrize("count", [0, 1, 32, 65])
@pytest.mark.parametrize("dims", [(60, 15), (64, 128)])
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(torch.float32, None), (torch.bfloat16, None), ("codes", torch.float16), ("codes of keys", torch.bfloat16)],
)
def test_the_kernel_copies_what_the_reference_copies(on_device, stored, dtype, dims, count):
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.gather.triton import copy_tokens_triton

    case = Case.of(stored, dims, count, dtype)
    assert equal(on_device(copy_tokens_triton, case.waiting, case.scales, case.into, *case.where), case.wanted())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stored", KINDS)
def test_pinned_memory_of_the_host_is_read_in_place(stored):
    from semkv.kernels.gather.triton import copy_tokens_triton

    case = Case.of(stored, (64, 60), 65)
    pinned = [x.pin_memory() for x in case.waiting], [x if x is None else x.pin_memory() for x in case.scales]
    found = copy_tokens_triton(*pinned, [x.cuda() for x in case.into], *case.where)
    assert equal([x.cpu() for x in found], case.wanted())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("form", ["raw", "int8"])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_pool_fills_slots_of_the_device(form, pinned):
    """Read in place or copied on the way; memory that was let go of meanwhile is not written anew under the reading."""
    pool, here = (
        HostTokens(2, 64, 60, torch.float32, form, tier=tier) for tier in (HostTier(pinned=pinned), HostTier())
    )
    k, v = torch.randn(2, 4000, 64), torch.randn(2, 4000, 60)
    pool.append(k, v)
    here.append(k, v)
    assert pool.in_place == pinned
    heads, places = torch.randint(0, 2, (900,)), torch.randint(0, 4000, (900,))
    slots = [torch.zeros(1000, size, device="cuda") for size in (64, 60)]
    pool.fill(slots, torch.arange(900), places, heads)
    del pool
    others = [torch.empty(2, 4000, 64, pin_memory=True).fill_(9.0) for _ in range(4)]
    wanted = here.gather(places, heads)
    assert equal([x[:900].cpu() for x in slots], wanted)
    assert len(others) == 4


def test_what_cannot_be_launched_is_refused():
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.gather.triton import copy_tokens_launches

    x, slots, tokens = torch.randn(2, 11, 8), torch.zeros(4, 8), torch.zeros(3, 4, dtype=torch.int64)
    with pytest.raises(InputError, match="what waits, or where it goes, is not contiguous"):
        copy_tokens_launches([x[:, ::2]], [None], [slots], tokens)
    with pytest.raises(
        InputError, match=r"waiting is torch\.float32 with scales, its place torch\.float32; codes uint8 become"
    ):
        copy_tokens_launches([x], [torch.ones(2, 11, 1)], [slots], tokens)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("count", [0, 1, 12, 64, 65, 200])
@pytest.mark.parametrize("dims", [(15, 60), (128, 16)])
@pytest.mark.parametrize("stored", KINDS)
def test_tokens_in_cpp_are_those_of_the_reference(stored, dims, count, mapped, threads, tmp_path):
    case = Case.of(stored, dims, count)
    wanted, waiting, scales = case.wanted(), case.waiting, case.scales
    if mapped:
        scales = [scale if scale is None else in_file(scale, tmp_path / f"scale{n}") for n, scale in enumerate(scales)]
        waiting = [in_file(x, tmp_path / f"pool{n}") for n, x in enumerate(waiting)]
    assert copies_tokens(waiting, scales, case.into)
    copy_tokens_cpp(waiting, scales, case.into, *case.where, threads=threads)
    assert equal(case.into, wanted)


def test_what_cpp_does_not_copy():
    rows, tokens = torch.zeros(4, 8), torch.zeros(2, 5, 8)
    codes = quantize(tokens, 8)
    assert not copies_tokens([tokens.bfloat16()], [None], [rows])
    assert not copies_tokens([codes.codes], [codes.scale], [rows.bfloat16()])
    assert not copies_tokens([tokens[:, ::2]], [None], [rows])
    assert not copies_tokens([tokens.to("meta")], [None], [rows.to("meta")])
