"""The operators on a memory's tensors in Triton: the cases of the other forms, in the interpreter, and their machine code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from semkv.kernels.state import REFERENCES
from semkv.runtime.store.quantization import dequantize, quantize
from tests.conftest import quick_ones
from tests.kernels import test_state_append, test_state_choose, test_state_scores, test_state_unfold
from tests.kernels.state_launches import launch
from tests.kernels.test_state_append import DTYPES
from tests.kernels.test_state_unfold import KINDS, Memory

pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
NAN, NONE = float("nan"), float("-inf")


@pytest.fixture
def in_triton(on_device) -> Callable[..., Any]:
    """An operator by name, in place, by launches alone."""

    def call(name: str, **arguments: Any) -> Any:
        found, there = on_device(launch, name, arguments)
        for key, x in there.items():
            arguments[key].copy_(x)
        return found

    return call


# -- append ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coded", [0, 8, 4])
@pytest.mark.parametrize(
    ("rows", "heads", "window", "tokens", "dims"),
    [
        (1, 1, 1, 1, (2, 2)),
        (3, 2, 5, 5, (15, 33)),
        (1, 4, 64, 1, (60, 128)),
        (2, 1, 4, 0, (3, 3)),
        (2, 1, 0, 0, (3, 3)),
    ],
)
def test_tokens_go_round_the_window(in_triton, rows, heads, window, tokens, dims, coded):
    given = test_state_append.made(rows, heads, window, tokens, dims, coded=coded)
    test_state_append.check(given, lambda **asked: in_triton("append_", **asked))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("new", DTYPES)
def test_numbers_are_rounded_as_pytorch_rounds(in_triton, dtype, new):
    test_state_append.test_numbers_are_rounded_as_pytorch_rounds(
        dtype, new, lambda **asked: in_triton("append_", **asked)
    )


@pytest.mark.slow
@pytest.mark.parametrize("new", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_those_of_the_runtime(in_triton, bits, new):
    def form(**asked):
        return in_triton("append_", **asked)

    test_state_append.test_codes_are_those_of_the_runtime(bits, new, form)
    test_state_append.test_what_is_no_number_stays_none_as_codes(bits, new, form)


def test_keys_may_be_codes_and_values_numbers(in_triton):
    test_state_append.test_keys_may_be_codes_and_values_numbers(lambda **asked: in_triton("append_", **asked))


# -- scores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", quick_ones([15, 60], [15]))
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, 8, 4])
@pytest.mark.parametrize("sizes", test_state_scores.SIZES, ids=str)
def test_products(in_triton, sizes, kind, dim):
    test_state_scores.test_products(sizes, kind, dim, in_triton)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_products_of_both_sides(on_device, bits, dtype):
    """Queries times a number, whose numbers above 0 meet one vector of a unit and those below another."""
    from semkv.kernels.state.triton.graph import products_of

    q = test_state_scores.drawn(2, 3, 5, 33).to(dtype)
    sides = [test_state_scores.drawn(2, 3, 70, 33, seed=seed) for seed in (1, 2)]
    packed = [quantize(x, min(bits, 8)) for x in sides]
    (x, scale), (y, y_scale) = zip(sides, (None, None)) if bits == 16 else ((own.codes, own.scale) for own in packed)
    found = on_device(products_of, q, x, scale, bits, 0.3, y, y_scale)
    wide = [side if bits == 16 else dequantize(own) for side, own in zip(sides, packed)]
    q = 0.3 * q.double()
    expected = q.clamp(min=0) @ wide[0].double().mT + q.clamp(max=0) @ wide[1].double().mT
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    alone = on_device(products_of, q.to(dtype), x, scale, bits, 1.0)
    torch.testing.assert_close(alone.double(), q.to(dtype).double() @ wide[0].double().mT, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("sizes", test_state_scores.SIZES, ids=str)
def test_look_up(in_triton, sizes, stages):
    test_state_scores.test_look_up(sizes, stages, in_triton)


@pytest.mark.parametrize("garbage", [NAN, NONE])
@pytest.mark.parametrize("sizes", [*test_state_scores.SIZES, (2, 1, 1, 9000)], ids=str)
def test_scores(in_triton, sizes, garbage):
    test_state_scores.test_scores(sizes, garbage, in_triton)


@pytest.mark.parametrize("sizes", test_state_scores.SIZES, ids=str)
def test_what_is_added_to_a_total(on_device, sizes):
    """A column of a larger tensor, as a product with several things is."""
    from semkv.kernels.state.triton.graph import scores_and

    rows, heads, queries, units = sizes
    logits, count = test_state_scores.drawn(*sizes), torch.arange(units, units - rows, -1).clamp(min=0)
    added = test_state_scores.drawn(rows, heads, queries, 5, seed=1).split([4, 1], -1)[1]
    score, total = on_device(scores_and, logits, count, added)
    expected = REFERENCES["scores"](logits, count)
    torch.testing.assert_close(score, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, expected[1] + added, rtol=1e-5, atol=1e-5)


def test_scores_at_their_ends(in_triton):
    test_state_scores.test_scores_of_what_nobody_wants_are_not_nan(in_triton)
    test_state_scores.test_scores_are_as_exact_far_from_zero(in_triton)


@pytest.mark.parametrize("softcap", [0.0, 2.5])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "sizes", quick_ones([(1, 1, 1, 1), (2, 3, 4, 37), (3, 2, 1, 63), (2, 1, 11, 20)], [(1, 1, 1, 1), (2, 1, 11, 20)])
)
def test_coarse_attention(in_triton, sizes, own, softcap):
    test_state_scores.test_coarse_attention(sizes, NAN, own, softcap, in_triton)


@pytest.mark.parametrize("own", [False, True])
def test_coarse_attention_over_several_splits(in_triton, own):
    """As exact as the reference in float32, and the same bits each time."""
    given = test_state_scores.coarse(1, 2, 3, 300, stages=2, dim=70, own=own)
    wide = {key: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for key, x in given.items()}
    exact, plain = (REFERENCES["coarse_attention"](**asked) for asked in (wide, given))
    found = in_triton("coarse_attention", **given, most=64)
    for got, near, true in zip(found, plain, exact):
        some = true.isfinite()
        assert torch.equal(got.isfinite(), some)
        error = [(x.double() - true)[some].square().mean().sqrt() for x in (got, near)]
        assert error[0] <= 2 * error[1]
    assert all(map(torch.equal, found, in_triton("coarse_attention", **given, most=64)))


# -- choices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", quick_ones(["drawn", "equal", "near", "wide"], ["equal", "wide"]))
@pytest.mark.parametrize("sizes", test_state_choose.SIZES, ids=str)
def test_it_chooses_what_loops_choose(in_triton, sizes, kind):
    """Both operators, and how many units are read."""

    def form(**asked: Any) -> Any:
        found, own = in_triton("choose_each", **asked)
        assert torch.equal(in_triton("choose", **asked), found)
        return found, own

    rows, heads, _, units = sizes
    for costs, thresholds, room in (
        (None, False, units // 3),
        (1, True, 3 * units),
        (heads, False, 1),
        (None, True, test_state_choose.ALL),
    ):
        arguments = test_state_choose.made(*sizes, kind, costs=costs, thresholds=thresholds)
        test_state_choose.check(arguments | {"room": torch.tensor([room, 7, 5, 0])[:rows]}, form)


# -- unfolding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", quick_ones(KINDS, ["bfloat16", "codes", "codes to float16"]))
@pytest.mark.parametrize("table", ["even", "bounds", "order"])
def test_slots_hold_what_is_chosen(in_triton, table, kind):
    for shared, where in ((False, False), (True, True)):
        memory = Memory(rows=3, kind=kind, table=table, shared=shared, where=where, dims=(16, 35))
        test_state_unfold.check(memory, lambda **asked: in_triton("unfold_", **asked))


@pytest.mark.parametrize("table", quick_ones(["even", "bounds", "order"], ["even", "order"]))
@pytest.mark.parametrize(
    "sizes",
    [
        {"units": 1, "places": 1, "capacity": 1, "longest": 1, "heads": 1, "rows": 1},
        {"units": 111, "places": 129, "capacity": 63, "longest": 1, "dims": (60, 1)},
        {"units": 5, "places": 700, "capacity": 400, "longest": 130},
        {"units": 120, "places": 9001, "capacity": 69, "longest": 67},
        {"units": 0, "places": 5, "capacity": 3},
        {"units": 3, "places": 0, "capacity": 3},
        {"units": 3, "places": 20, "capacity": 0},
        {"units": 3, "places": 20, "capacity": 4, "heads": 0},
    ],
    ids=str,
)
def test_odd_sizes(in_triton, sizes, table):
    test_state_unfold.check(Memory(table=table, **sizes), lambda **asked: in_triton("unfold_", **asked))


def test_tensors_may_be_parts_of_larger_ones(in_triton):
    def form(**asked: Any) -> Any:
        return in_triton("unfold_", **asked)

    test_state_unfold.test_tensors_may_be_parts_of_larger_ones(form)
    test_state_unfold.test_what_stays_stays_where_it_is(form)
    test_state_unfold.test_where_there_are_too_few_slots_the_last_tokens_are_left_out(form)


# -- what there is no kernel for ---------------------------------------------------------------------------------------


def test_what_there_is_no_kernel_for_is_computed_by_pytorch():
    """Numbers of other kinds, and gaps between the last ones: no launch, the same results."""
    from semkv.ir import state_ops
    from semkv.kernels.state.triton import FORMS
    from semkv.kernels.state.triton.graph import counted_choice, counted_choices, products_of, scores_and

    def with_total(logits, count, added):
        score, total = REFERENCES["scores"](logits, count)
        return score, total + added

    drawn = test_state_scores.drawn
    q, x, y = drawn(2, 3, 4, 10), drawn(2, 3, 20, 10, seed=1), drawn(2, 3, 20, 10, seed=2)
    wide = products_of(q.double(), x, None, 16, 2.0, y, None)
    torch.testing.assert_close(wide, 2 * (q.clamp(min=0) @ x.mT + q.clamp(max=0) @ y.mT))
    apart = drawn(2, 3, 4, 10)[..., ::2], drawn(2, 3, 20, 10, seed=1)[..., ::2]
    assert torch.equal(products_of(*apart, None, 16, 1.0), apart[0] @ apart[1].mT)
    assert torch.equal(FORMS[state_ops.products](*apart), apart[0] @ apart[1].mT)
    given = [drawn(2, 3, 4, 50)[..., ::2], torch.tensor([25, 11]), torch.tensor([5, 20])]
    expected, own = REFERENCES["choose_each"](*given)
    assert all(map(torch.equal, counted_choices(*given), (expected, own, own.sum(-1))))
    chosen, none, read = counted_choice(*given)
    assert none is None
    assert torch.equal(chosen, expected)
    assert torch.equal(read, expected.sum(-1))
    assert all(map(torch.equal, scores_and(*given[:2], given[0][..., :1]), with_total(*given[:2], given[0][..., :1])))
    logits = given[0].double()
    assert all(map(torch.equal, FORMS[state_ops.scores](logits, given[1]), REFERENCES["scores"](logits, given[1])))
