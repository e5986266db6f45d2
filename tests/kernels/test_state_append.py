"""`semkv::append_` against loops: tokens, positions and codes, at places that come round."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from semkv.errors import InputError
from semkv.ir import state_ops
from semkv.kernels.calls import UnsupportedCall, run
from semkv.kernels.codes import code_bits
from semkv.kernels.cpp import compiler
from semkv.kernels.state import IN_CPP, REFERENCES
from semkv.kernels.state.append import append_library, describe_append
from semkv.runtime.store.quantization import quantize

FORMS = ["reference", pytest.param("cpp", marks=pytest.mark.skipif(compiler() is None, reason="no C++ compiler"))]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


def appended(form, **arguments) -> None:
    """Append by a form, in place; the form in C++ is one, not the reference in its place. form: its name, or what does it."""
    if callable(form):
        form(**arguments)
        return
    if form == "reference":
        REFERENCES["append_"](**arguments)
        return
    call = IN_CPP["append_"].call(dict.fromkeys(("k_scale", "v_scale")) | arguments)
    assert call is not None
    run(call, arguments)


def made(rows, heads, window, tokens, dims, *, dtype=torch.float32, new=torch.float32, coded=0, seed=0):
    """Arguments: a memory of NaN, or of codes of `coded` bits and arbitrary bytes, within larger tensors; new tokens as views of
    projections [B, T, H * D]."""
    generator = torch.Generator().manual_seed(seed)
    given = {}
    for name, width in zip("kv", dims):
        if coded:
            shape = (rows, heads, window + 3, (width * coded + 7) // 8)
            given[name] = torch.randint(0, 256, shape, generator=generator).byte()[:, :, 2:-1]
            given[f"{name}_scale"] = torch.full((rows, heads, window + 1, 1), NAN, dtype=torch.float16)[:, :, 1:]
        else:
            given[name] = torch.full((rows, heads + 1, window, width + 2), NAN, dtype=dtype)[:, 1:, :, :width]
        x = torch.randn(rows, tokens, heads * width, generator=generator) * 10 ** torch.randint(
            -3, 4, (rows, tokens, 1), generator=generator
        )
        given[f"new_{name}"] = x.to(new).unflatten(2, (heads, width)).transpose(1, 2)
    given["positions"] = torch.full((rows, 1, window), state_ops.EMPTY, dtype=torch.int32)
    given["new_positions"] = torch.randint(0, 1 << 30, (rows, tokens), generator=generator)
    given["at"] = torch.randint(0, 5 * window + 1, (rows,), generator=generator)
    return given


def by_loops(given) -> dict[str, torch.Tensor]:
    """What `append_` makes of the memory of these arguments."""
    out = {name: given[name].clone() for name in ("k", "v", "positions", "k_scale", "v_scale") if name in given}
    rows, heads, window, _ = given["k"].shape
    for row in range(rows):
        for token in range(given["new_k"].shape[2]):
            place = (int(given["at"][row]) + token) % window
            out["positions"][row, 0, place] = int(given["new_positions"][row, token])
            for head in range(heads):
                for name in "kv":
                    x = given[f"new_{name}"][row, head, token]
                    if f"{name}_scale" in given:
                        packed = quantize(x, code_bits(given[name], len(x)))
                        out[name][row, head, place], out[f"{name}_scale"][row, head, place] = packed.codes, packed.scale
                    else:
                        out[name][row, head, place] = x.to(out[name].dtype)
    return out


def check(given, form) -> None:
    expected = by_loops(given)
    appended(form, **given)
    for name, x in expected.items():
        assert torch.equal(given[name].nan_to_num(nan=-7.0), x.nan_to_num(nan=-7.0)), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("coded", [0, 8, 4])
@pytest.mark.parametrize(
    ("rows", "heads", "window", "tokens", "dims"),
    [
        (1, 1, 1, 1, (2, 2)),
        (3, 2, 5, 5, (15, 33)),
        (2, 3, 7, 4, (16, 8)),
        (1, 4, 64, 1, (60, 128)),
        (2, 1, 4, 0, (3, 3)),
        (2, 1, 0, 0, (3, 3)),
    ],
)
def test_tokens_go_round_the_window(rows, heads, window, tokens, dims, coded, form):
    check(made(rows, heads, window, tokens, dims, coded=coded), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("new", DTYPES)
def test_numbers_are_rounded_as_pytorch_rounds(dtype, new, form):
    given = made(2, 2, 40, 40, (33, 17), dtype=dtype, new=new)
    given["new_k"][0, 0, 0, :6] = torch.tensor([65519.0, 65520.0, 1e30, -1e-7, 2.0**-25, -0.0]).to(new)
    check(given, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("new", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_those_of_the_runtime(bits, new, form):
    """Zeros, halves between two codes, the smallest and the largest scales."""
    given = made(1, 2, 300, 300, (63, 63), new=new, coded=bits)
    generator = torch.Generator().manual_seed(3)
    x = given["new_k"]
    x[0, 0, 0] = 0
    x[0, 0, 1] = torch.arange(-31, 32) / 2
    x[0, 0, 1, 0] = 127
    size = 10 ** (torch.rand(1, 298, 1, generator=generator) * 14 - 9)
    x[:, 0, 2:] = (torch.randn(1, 298, 63, generator=generator) * size).to(new).clamp(-6e4, 6e4)
    if new == torch.float32:
        x[0, 1, 0] *= 1e30
        x[0, 1, 1] *= 1e-30
    check(given, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("new", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_no_number_stays_none_as_codes(bits, new, form):
    given = made(1, 2, 8, 3, (35, 16), new=new, coded=bits)
    given["new_k"][0, 0, 1, 34] = given["new_k"][0, 1, 2, 3] = given["new_v"][0, 1, 0, 9] = NAN
    places = (int(given["at"][0]) + torch.arange(3)) % 8
    appended(form, **given)
    none = {name: given[f"{name}_scale"][0, :, places, 0].isnan().tolist() for name in "kv"}
    assert none == {
        "k": [[False, True, False], [False, False, True]],
        "v": [[False, False, False], [True, False, False]],
    }


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_its_object_is_named_after_its_file():
    assert append_library().name == "state-append"


@pytest.mark.parametrize("form", FORMS)
def test_keys_may_be_codes_and_values_numbers(form):
    given = made(2, 2, 6, 3, (8, 8), coded=8)
    del given["v_scale"]
    given["v"] = torch.full(given["v"].shape, NAN, dtype=torch.bfloat16)
    check(given, form)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_threads_change_nothing():
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        given = made(2, 4, 200, 199, (128, 64), coded=8)
        appended("cpp", **given)
        results.append([given[name].nan_to_num(nan=-7.0) for name in ("k", "v", "k_scale", "v_scale", "positions")])
    torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


def test_the_operator_is_as_its_schema_says():
    for coded in (0, 8, 4):
        given = made(2, 2, 6, 3, (8, 5), coded=coded)
        given = {name: x.nan_to_num() for name, x in given.items()}
        torch.library.opcheck(state_ops.append_, (), given, test_utils=("test_schema", "test_faketensor"))
        expected = by_loops(given)
        state_ops.append_(**given)
        assert all(torch.equal(given[name], x) for name, x in expected.items())


@pytest.mark.parametrize("coded", [0, 8, 4])
def test_the_reference_is_traced_without_numbers(coded):
    given = made(2, 2, 6, 3, (8, 5), coded=coded)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = {name: mode.from_tensor(x) for name, x in given.items()}
        assert REFERENCES["append_"](**fake) is None

    def traced(arguments):
        REFERENCES["append_"](**arguments)
        return arguments

    graph = make_fx(traced, tracing_mode="fake")(given)
    for seed in (0, 1):
        given = made(2, 2, 6, 3, (8, 5), coded=coded, seed=seed)
        expected = by_loops(given)
        graph(given)
        assert all(torch.equal(given[name].nan_to_num(), x.nan_to_num()) for name, x in expected.items())


def test_what_cpp_cannot_is_done_by_the_reference():
    given = made(1, 2, 4, 2, (8, 8))
    given["new_k"] = given["new_k"].double()
    assert IN_CPP["append_"].call(dict.fromkeys(("k_scale", "v_scale")) | given) is None
    expected = by_loops(given)
    state_ops.append_(**given)
    assert all(torch.equal(given[name].nan_to_num(), x.nan_to_num()) for name, x in expected.items())


@pytest.mark.parametrize("coded", [0, 8, 4])
def test_a_call_is_described_without_numbers(coded):
    given = made(2, 3, 6, 3, (8, 5), coded=coded)
    meta = {name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for name, x in given.items()}
    one, other = describe_append(**given), describe_append(**meta)
    assert (one.words, one.addresses, one.arguments) == (other.words, other.addresses, other.arguments)
    assert set(one.written) == {"k", "v", "positions"} | ({"k_scale", "v_scale"} if coded else set())
    assert not one.outputs
    assert not one.scratch


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_a_call_takes_what_it_was_described_for():
    given = made(2, 3, 6, 3, (8, 5))
    call = describe_append(**given)
    for name, wrong in (
        ("k", given["k"].half()),
        ("new_k", given["new_k"].contiguous()),
        ("at", given["at"][:1]),
        ("v", None),
    ):
        with pytest.raises(InputError, match=f"append_tokens was given {name} .* expected Layout"):
            run(call, given | {name: wrong})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("positions", lambda x: x.long()),
        ("k", lambda x: x.double()),
        ("new_v", lambda x: x.repeat_interleave(2, 3)[..., ::2]),
        ("new_k", lambda x: torch.cat([x, x, x], 2)),
    ],
)
def test_what_there_is_no_function_for_is_said(name, change):
    given = made(2, 3, 6, 3, (8, 5))
    with pytest.raises(UnsupportedCall, match="expected"):
        describe_append(**given | {name: change(given[name])})
