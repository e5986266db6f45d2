"""Inputs that come last in a list: the same list is not looked at again, and another one is."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from semkv.kernels.cpp import compiler
from semkv.kernels.segments import Behind, Segment, whole
from semkv.kernels.segments.tape import Tape

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


def drawn(seed: int, size: int = 37) -> Tensor:
    return torch.randn(3, size, generator=torch.Generator().manual_seed(seed))


def made() -> Segment:
    return whole(make_fx(lambda x, y, z: x * 2 + y * z)(drawn(0), drawn(1), drawn(2)))


def check(segment: Segment, x: Tensor, behind: Behind) -> None:
    with torch.no_grad():
        got = segment(x, behind=behind)
    assert segment.reason is None
    torch.testing.assert_close(got, x * 2 + behind[0] * behind[1])


def test_the_same_list_is_looked_at_once(monkeypatch):
    """All inputs are, where the list is another."""
    looked, given = [], Tape.given
    monkeypatch.setattr(Tape, "given", lambda tape, inputs: looked.append(len(inputs)) or given(tape, inputs))
    segment, behind = made(), Behind([drawn(1), drawn(2)])
    for seed in range(3, 8):
        check(segment, drawn(seed), behind)
    assert looked == [3]
    check(segment, drawn(8), Behind(behind))
    assert looked == [3, 3]


def test_numbers_that_change_in_place_are_read():
    segment, behind = made(), Behind([drawn(1), drawn(2)])
    for seed in range(3, 6):
        check(segment, drawn(seed), behind)
        behind[0].copy_(drawn(seed + 10))


def test_each_list_has_its_own_tensors():
    segment, lists = made(), [Behind([drawn(n), drawn(n + 1)]) for n in range(0, 6, 2)]
    for behind in (*lists, *reversed(lists)):
        check(segment, drawn(9), behind)


def test_a_list_in_the_place_of_one_that_is_gone_is_another():
    segment = made()
    for seed in range(12):
        behind = Behind([drawn(seed), drawn(seed + 1)])
        check(segment, drawn(9), behind)
        del behind
        gc.collect(1)  # what is older stays: a whole collection of a long test run takes a second


def test_the_same_list_behind_another_number_of_inputs():
    """Two inputs of three before a list of two are none of this graph."""
    segment, behind = made(), Behind([drawn(1), drawn(2)])
    check(segment, drawn(3), behind)
    with torch.no_grad(), pytest.raises(TypeError):
        segment(drawn(3), drawn(4), behind=behind)
    check(segment, drawn(3), behind)


def test_an_input_of_another_layout_before_the_same_list():
    """It is computed all the same: by other instructions, or by the graph."""
    segment, behind = made(), Behind([drawn(1), drawn(2)])
    for x in (drawn(3), drawn(3, 74)[:, ::2], drawn(4)):
        check(segment, x, behind)


def test_threads_with_lists_of_their_own():
    segment = made()

    def wrong(seed: int) -> int:
        behind, x = Behind([drawn(seed), drawn(seed + 1)]), drawn(seed + 2)
        expected = x * 2 + behind[0] * behind[1]
        with torch.no_grad():
            return sum(not torch.allclose(segment(x, behind=behind), expected, atol=1e-6) for _ in range(300))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(wrong, range(0, 40, 10))) == [0] * 4
