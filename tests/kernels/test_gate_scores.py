"""SeKV's gate: the reference against the router, Triton against the reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from semkv.errors import InputError
from semkv.kernels.gate_scores import gate_scores_reference
from semkv.methods.routers import GateRouter
from semkv.runtime.step import Step
from semkv.runtime.store.quantization import quantize

CASES = [
    # bits, width, kv heads, group, tokens, dim, units, own lengths, dtype
    (8, 16, 1, 1, 1, 60, 63, False, torch.float32),
    (4, 8, 2, 4, 1, 64, 70, True, torch.float16),
    (8, 32, 1, 5, 1, 128, 33, False, torch.bfloat16),
    (4, 5, 1, 4, 5, 15, 17, False, torch.float32),  # two blocks of rows, half a byte left
    (8, 3, 2, 1, 19, 24, 1, True, torch.float32),  # many tokens
]


def made(
    bits: int, width: int, kv_heads: int, group: int, tokens: int, dim: int, units: int, own: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Arguments of `gate_scores_reference`."""
    generator = torch.Generator().manual_seed(bits + dim)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    heads = kv_heads * group
    means, weight = quantize(numbers(kv_heads, units, dim), bits), numbers(heads, width, dim) / dim**0.5
    norms = (0.5 + torch.rand(heads, units, 1, generator=generator)).half()
    lengths = torch.randint(1, 40, (kv_heads if own else 1, units), generator=generator, dtype=torch.int32)
    return (
        numbers(heads, tokens, dim).to(dtype),
        weight,
        means.codes,
        means.scale,
        norms,
        lengths,
        numbers(heads),
        numbers(heads),
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_what_the_router_scores(case):
    q, weight, codes, scale, norms, lengths, offset, threshold = made(*case)
    router = GateRouter({0: weight}, {0: offset}, {0: threshold})
    site = SimpleNamespace(index=0, kv_heads=case[2], q_heads=len(q), group_size=case[3], query_heads=slice(0, len(q)))
    means = quantize(torch.zeros(1, 1, case[5]), case[0])
    held = type(means)(codes, scale, case[0], case[5])
    spans = SimpleNamespace(mean_k=held, index={}, lengths=lengths, indexed=lambda name: norms.float())
    got = gate_scores_reference(q, weight, codes, scale, norms, lengths, offset, threshold, bits=case[0])
    torch.testing.assert_close(got, router.score(site, q, spans, Step.alone(site, q)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_equals_the_reference(on_device, case):
    """The error against float64 is at most twice that of the reference in float32."""
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.gate_scores.triton import gate_scores_triton

    x = made(*case)
    got = on_device(gate_scores_triton, *x, bits=case[0], block=32)
    exact = gate_scores_reference(x[0], x[1].double(), *x[2:], bits=case[0])
    plain = gate_scores_reference(*x, bits=case[0])
    assert got.dtype == torch.float32
    assert torch.isfinite(got).all()
    assert (got - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_what_does_not_fit_together_is_refused():
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.gate_scores.triton import gate_scores_launches

    x = made(*CASES[1])
    with pytest.raises(InputError, match=r"codes are torch\.uint8 with 32 bytes a span; expected torch\.uint8 with 64"):
        gate_scores_launches(*x, bits=8)
    with pytest.raises(InputError, match="bits is 3; expected 4 or 8"):
        gate_scores_launches(*x, bits=3)
    with pytest.raises(InputError, match="7 query heads for 2 KV heads"):
        gate_scores_launches(x[0][:7], *x[1:], bits=4)
