"""The gather of waiting tokens: the reference against the runtime's own codes, Triton against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from semkv.errors import InputError
from semkv.kernels.gather import gather_tokens_reference
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
