"""The gather of waiting tokens: the reference against the runtime's own codes, Triton against the reference, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from semkv.errors import InputError
from semkv.kernels.cpp import compiler
from semkv.kernels.gather import gather_tokens_reference
from semkv.kernels.gather.cpp import copies_tokens, copy_tokens_cpp
from semkv.runtime.quantization import dequantize, quantize

INDEX = torch.tensor([[3, -1, 0, 10, 3], [7, 7, 1, -1, -1]])


def test_the_reference_reads_what_the_runtime_stores():
    x = torch.randn(2, 11, 60, generator=torch.Generator().manual_seed(0))
    kept = quantize(x, 8)
    got = gather_tokens_reference(kept.codes, INDEX, kept.scale, dtype=torch.float32)
    wanted = dequantize(kept)[torch.arange(2)[:, None], INDEX.clamp(min=0)].masked_fill((INDEX < 0)[..., None], 0)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("dim", [60, 64])
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("raw", torch.float32), ("raw", torch.bfloat16), ("int8", torch.float16), ("int8", torch.bfloat16)],
)
def test_the_kernel_gathers_what_the_reference_gathers(on_device, stored, dtype, dim):
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.gather.triton import gather_tokens_triton

    x = torch.randn(2, 11, dim, generator=torch.Generator().manual_seed(1))
    kept = quantize(x, 8)
    waiting, scale = (kept.codes, kept.scale) if stored == "int8" else (x.to(dtype), None)
    wanted = gather_tokens_reference(waiting, INDEX, scale, dtype=dtype)
    assert torch.equal(on_device(gather_tokens_triton, waiting, INDEX, scale, dtype=dtype), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory_of_the_host_is_read_in_place():
    from semkv.kernels.gather.triton import gather_tokens_triton

    x = torch.randn(2, 11, 64).pin_memory()
    got = gather_tokens_triton(x, INDEX.cuda(), dtype=torch.float32)
    assert torch.equal(got.cpu(), gather_tokens_reference(x, INDEX, dtype=torch.float32))


def test_what_cannot_be_launched_is_refused():
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.gather.triton import gather_tokens_launches

    x = torch.randn(2, 11, 8)
    with pytest.raises(InputError, match="what waits is not contiguous"):
        gather_tokens_launches(x[:, ::2], INDEX, dtype=torch.float32)
    with pytest.raises(InputError, match=r"waiting is torch\.float32 with scales; codes uint8 have some"):
        gather_tokens_launches(x, INDEX, torch.ones(2, 11, 1), dtype=torch.float32)


def in_file(x: torch.Tensor, path: Path) -> torch.Tensor:
    """A copy in a mapped file."""
    mapped = torch.from_file(str(path), shared=True, size=x.numel(), dtype=x.dtype).view(x.shape)
    return mapped.copy_(x)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("count", [0, 1, 12, 64, 65, 200])
@pytest.mark.parametrize(("dim", "value_dim"), [(15, 60), (128, 16)])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, "codes", "codes of keys"])
def test_tokens_in_cpp_are_those_of_the_reference(stored, dim, value_dim, count, mapped, threads, tmp_path):
    heads, tokens, slots = 3, 301, 400
    generator = torch.Generator().manual_seed(count)
    waiting, scales, dtype = [], [], stored if isinstance(stored, torch.dtype) else torch.float32
    for name, size in (("keys", dim), ("values", value_dim)):
        x = torch.randn(heads, tokens, size, generator=generator)
        coded = quantize(x, 8) if stored == "codes" or (stored == "codes of keys" and name == "keys") else None
        waiting.append(x.to(dtype) if coded is None else coded.codes)
        scales.append(None if coded is None else coded.scale)
    if mapped:
        scales = [scale if scale is None else in_file(scale, tmp_path / f"scale{n}") for n, scale in enumerate(scales)]
        waiting = [in_file(x, tmp_path / f"pool{n}") for n, x in enumerate(waiting)]
    into = [torch.full((slots, size), float("nan"), dtype=dtype) for size in (dim, value_dim)]
    head, place = (torch.randint(0, n, (count,), generator=generator) for n in (heads, tokens))
    at = torch.randperm(slots, generator=generator)[:count]
    assert copies_tokens(waiting, scales, into)
    copy_tokens_cpp(waiting, scales, into, head, place, at, threads=threads)
    others = torch.ones(slots, dtype=torch.bool).index_fill_(0, at, False)
    for x, scale, out in zip(waiting, scales, into):
        index = torch.full((heads, count), -1)
        index[head, torch.arange(count)] = place
        wanted = gather_tokens_reference(x, index, scale, dtype=dtype)[head, torch.arange(count)]
        assert torch.equal(out[at], wanted)
        assert out[others].isnan().all()


def test_what_cpp_does_not_copy():
    rows, tokens = torch.zeros(4, 8), torch.zeros(2, 5, 8)
    codes = quantize(tokens, 8)
    assert not copies_tokens([tokens.bfloat16()], [None], [rows])
    assert not copies_tokens([codes.codes], [codes.scale], [rows.bfloat16()])
    assert not copies_tokens([tokens[:, ::2]], [None], [rows])
    assert not copies_tokens([tokens.to("meta")], [None], [rows.to("meta")])
