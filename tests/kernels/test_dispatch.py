"""Which form answers a call, and why not the other."""

from __future__ import annotations

import pytest
import torch

from semkv.errors import ConfigError
from semkv.ir import ops
from semkv.kernels import cpp
from semkv.kernels.mixed_attention import dispatch, mixed_attention, mixed_attention_blocked
from semkv.kernels.mixed_attention.call import AttentionCall
from semkv.kernels.mixed_attention.dispatch import form_of, refusal

pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')

CUDA = torch.device("cuda")
SCALE = 0.3


class OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = CUDA


def call(entries, fresh=False, window=0, **shape):
    """A decode step, queries on a pretended GPU."""
    q, where, own = entries(**{"batch": 1, "tokens": 1, "dtype": torch.float32} | shape)
    return AttentionCall.of(q.as_subclass(OnCuda), where, *own, scale=SCALE, window=window, fresh=fresh)


def test_a_decode_step_on_cuda_is_tritons(entries):
    assert refusal(call(entries, coarse=3, spans=2, biased=True)) is None
    assert refusal(call(entries, batch=3, tokens=4, window=9)) is None


@pytest.mark.parametrize(
    ("step", "kernel", "said"),
    [
        ({}, "torch", "PyTorch was asked for"),
        ({"fresh": True}, "auto", "a prompt attends to its own tokens"),
        ({"tokens": 33}, "auto", "33 queries for each of 2 heads of a group; the kernel takes 64 rows"),
        ({"dtype": torch.float64}, "auto", "queries are torch.float64"),
        ({"dim": 257}, "auto", "head dims are 257 and 257; the kernel takes up to 256"),
    ],
)
def test_what_the_kernel_is_not_made_for(entries, step, kernel, said):
    assert refusal(call(entries, **step), kernel).startswith(said)


def test_gradients_are_pytorchs(entries):
    step = call(entries)
    step.entries.block_k[0].requires_grad_()
    assert refusal(step) == "gradients flow through it"
    with torch.no_grad():
        assert refusal(step) is None


def test_a_cpu_without_a_compiler_is_pytorchs_unless_the_interpreter_is_asked_for(entries, monkeypatch):
    monkeypatch.setattr(dispatch, "compiler", lambda: None)
    q, where, own = entries(dtype=torch.float32)
    assert refusal(AttentionCall.of(q, where, *own, scale=SCALE)) == "no C++ compiler was found (g++ or clang++)"
    wanted = mixed_attention_blocked(q, where, *own, scale=SCALE)
    assert torch.equal(mixed_attention(q, where, *own, scale=SCALE), wanted)
    with pytest.raises(ConfigError, match=r"kernels 'triton' on cpu: .* TRITON_INTERPRET=1"):
        ops.mixed_attention(q, where, *own, scale=SCALE, kernel="triton")


def test_the_operator_takes_the_kernel_and_its_layout(on_device, entries):
    q, where, own = entries(batch=1, tokens=1, dtype=torch.float32)
    got = on_device(mixed_attention, q, where, *own, scale=SCALE, kernel="triton", layout=[16, 4, 2, 2, 0])
    assert not torch.isnan(got).any()
    torch.testing.assert_close(got, mixed_attention_blocked(q, where, *own, scale=SCALE))


def test_what_answers_on_a_device(monkeypatch):
    monkeypatch.setattr(dispatch, "compiler", lambda: cpp.Compiler("g++", "12"))
    cpu = torch.device("cpu")
    assert form_of("auto", CUDA) == form_of("triton", CUDA) == ("triton", "")
    assert form_of("auto", cpu) == form_of("cpp", cpu) == ("cpp", "")
    assert form_of("torch", cpu) == form_of("torch", CUDA) == ("torch", "PyTorch was asked for")
    assert form_of("auto", torch.device("meta")) == ("torch", "the device is meta")


def test_what_is_not_known_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="kernels 'cuda': expected one of auto, torch, cpp, triton"):
        form_of("cuda", CUDA)
    with pytest.raises(ConfigError, match="kernels 'cpp' on cuda: it is for CPUs; use 'auto'"):
        form_of("cpp", CUDA)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    assert form_of("auto", CUDA) == ("torch", "the package triton is not installed")
    with pytest.raises(ConfigError, match="the package triton is not installed; install it, or use 'auto'"):
        form_of("triton", CUDA)
