"""What kernels in C++ are handed is looked at before they read or write: another tensor is an error, not a wrong read."""

from __future__ import annotations

import pytest
import torch

from semkv.errors import InputError
from semkv.kernels import cpp
from semkv.kernels.addresses import address_of
from semkv.kernels.code_products.cpp import code_norms_cpp, code_products_cpp
from semkv.kernels.gather.cpp import copy_tokens_cpp
from semkv.kernels.linear.cpp import linear_cpp
from semkv.kernels.log_softmax.cpp import log_softmax_cpp
from semkv.kernels.mixed_attention.cpp import mixed_attention_cpp
from semkv.kernels.selection.cpp import select_cpp

needs_compiler = pytest.mark.skipif(cpp.compiler() is None, reason="needs a C++ compiler")
F, D, H, L, J, U, B = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


def of(shape: tuple[int, ...], dtype: torch.dtype = F, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


CALLS = {
    "log_softmax": (log_softmax_cpp, (of((2, 5)),)),
    "linear": (linear_cpp, (of((1, 2, 4)), of((3, 4)), of((3,)))),
    "code_products": (
        lambda q, c, s: code_products_cpp(q, c, 8, s),
        (of((2, 3, 4)), of((2, 5, 4), U), of((2, 5, 1), H)),
    ),
    "code_norms": (lambda c, s: code_norms_cpp(c, 8, s), (of((2, 5, 4), U), of((2, 5, 1), H))),
    "copy_tokens": (
        lambda k, ks, k2, h, p, a: copy_tokens_cpp([k], [ks], [k2], h, p, a),
        (of((2, 6, 4), U), of((2, 6, 1), H), of((3, 4)), of((2,), L), of((2,), L), of((2,), L)),
    ),
    "select": (lambda s, t, c: select_cpp(s, t, c, 3, 2), (of((4, 1, 5)), of((4,)), of((2, 5), L))),
    "mixed_attention": (
        lambda q, w, k, v, p, s: mixed_attention_cpp(q, w, [k], [v], [p], sinks=s),
        (of((1, 4, 1, 16)), of((1, 1), L), of((1, 2, 5, 16)), of((1, 2, 5, 16)), of((1, 1, 5), L), of((4,))),
    ),
}
"""A good call of each kernel. One tensor at a time is replaced by another one."""

CONVERTED = {
    ("linear", 0, "gaps"),
    ("linear", 2, "gaps"),
    ("select", 0, "gaps"),
    ("select", 1, "gaps"),
    ("select", 2, "gaps"),
    ("copy_tokens", 3, "gaps"),
    ("copy_tokens", 4, "gaps"),
    ("copy_tokens", 5, "gaps"),
    ("code_products", 0, "gaps"),
    ("code_products", 1, "gaps"),
    ("code_products", 2, "gaps"),
    ("code_norms", 0, "gaps"),
    ("code_norms", 1, "gaps"),
    *(("mixed_attention", place, "gaps") for place in range(6)),
    ("mixed_attention", 0, "dtype"),
    ("mixed_attention", 1, "dtype"),
    ("mixed_attention", 4, "dtype"),
    ("mixed_attention", 5, "dtype"),
}
"""What a wrapper is told the strides of, or converts itself."""


def _spoiled(x: torch.Tensor, how: str) -> torch.Tensor:
    if how == "dtype":
        return x.to(D if x.dtype != D else F)
    if how == "device":
        return x.to("meta")
    wide = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1]))
    wide[..., ::2] = x
    return wide[..., ::2]


CASES = [
    (name, place, how)
    for name, (_, given) in CALLS.items()
    for place in range(len(given))
    for how in ("dtype", "device", "gaps")
]


@needs_compiler
@pytest.mark.parametrize("name", CALLS)
def test_what_fits_is_computed(name: str) -> None:
    call, given = CALLS[name]
    call(*(x.clone() for x in given))


@needs_compiler
@pytest.mark.parametrize(("name", "place", "how"), CASES)
def test_another_tensor_is_refused_before_anything_is_written(name: str, place: int, how: str) -> None:
    call, given = CALLS[name]
    arguments = [x.clone() for x in given]
    kept = [x.clone() for x in arguments]
    arguments[place] = _spoiled(arguments[place], how)
    if (name, place, how) in CONVERTED:
        call(*arguments)
        return
    with pytest.raises((InputError, RuntimeError)) as caught:
        call(*arguments)
    assert isinstance(caught.value, InputError) or "meta" in str(caught.value)
    untouched = [x for at, x in enumerate(arguments) if at != place]
    assert all(torch.equal(x, y) for x, y in zip(untouched, [y for at, y in enumerate(kept) if at != place]))


@needs_compiler
@pytest.mark.parametrize(
    ("name", "place", "shape"),
    [
        ("linear", 0, (1, 2, 3)),
        ("linear", 2, (2,)),
        ("code_products", 0, (2, 3, 9)),
        ("code_products", 0, (3, 3, 4)),
        ("code_products", 2, (2, 4, 1)),
        ("code_norms", 1, (2, 4, 1)),
        ("copy_tokens", 1, (2, 5, 1)),
        ("copy_tokens", 2, (3, 5)),
        ("copy_tokens", 4, (1,)),
        ("select", 1, (3,)),
        ("select", 2, (2, 4)),
        ("mixed_attention", 3, (1, 2, 4, 16)),
        ("mixed_attention", 2, (1, 2, 5, 15)),
    ],
)
def test_another_size_is_refused(name: str, place: int, shape: tuple[int, ...]) -> None:
    call, given = CALLS[name]
    arguments = [x.clone() for x in given]
    arguments[place] = of(shape, arguments[place].dtype)
    with pytest.raises(InputError, match="expected"):
        call(*arguments)


def test_the_message_says_what_was_given_and_what_was_expected() -> None:
    x = of((4, 6), D)[:, ::2]
    with pytest.raises(
        InputError,
        match=r"given scores torch.float64 \(4, 3\) on cpu with strides \(6, 2\); expected contiguous torch.float32 \(4, 3\) on cpu",
    ):
        address_of("scores", x, F, (4, 3))
    assert address_of("scores", x, D, (4, 3), dense=False) == x.data_ptr()
