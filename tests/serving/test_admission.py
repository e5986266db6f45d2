"""Units of memory that a request takes: never less than its bytes, never less for a longer one."""

from __future__ import annotations

import pytest

from semkv.config import CompileConfig
from semkv.errors import ConfigError
from semkv.runtime.budgets.request_bytes import RequestBytes
from semkv.serving.admission import LENGTHS, UNIT, Admission, units


def linear(length):
    return RequestBytes(device=50_000 * length, host=1000 * length, reading=70_000 * length)


@pytest.mark.parametrize("longest", [1, 7, 512, 513, 2000])
def test_a_table_covers_every_length(longest):
    table = Admission.of(linear, longest, host=True)
    assert len(table.reading) == len(table.running) <= LENGTHS
    for length in range(1, longest + 1):
        bound = linear(length)
        assert table.units(length, reading=True) * UNIT >= bound.device + bound.reading
        assert table.units(length, reading=False) * UNIT >= bound.device + bound.host
    last = linear(longest)
    assert table.most == units(last.device + last.reading)


def test_on_a_gpu_the_device_counts_alone():
    table = Admission.of(linear, 800, host=False)
    assert table.reading == table.running
    assert table.units(800, reading=True) == units(50_000 * 800)


def test_a_longer_request_never_takes_less():
    def falling(length):
        return RequestBytes(device=10 * UNIT if length < 20 else UNIT, host=0, reading=0)

    table = Admission.of(falling, 40, host=False)
    assert [table.units(length, reading=False) for length in (1, 19, 20, 40)] == [10, 10, 10, 10]


def test_a_compiled_model_is_admitted_by_its_bytes(base):
    compiled = base.with_method("snapkv", 0.2, config=CompileConfig())
    table = Admission.of(compiled.request_bytes, 2048, host=True)
    bound = compiled.request_bytes(1001)
    assert table.units(1001, reading=False) * UNIT >= bound.device + bound.host
    full = Admission.of(base.request_bytes, 2048, host=True)
    assert table.units(2048, reading=False) < full.units(2048, reading=False) / 2
    state = compiled.prefill(_ids(1001))
    assert state.nbytes["device"] + state.nbytes["host"] <= table.units(1001, reading=False) * UNIT


def _ids(count):
    import torch

    return torch.randint(3, 600, (1, count), generator=torch.Generator().manual_seed(0))


def test_the_longest_request_has_to_fit():
    table = Admission.of(linear, 800, host=True)
    table.check(table.most, 800)
    message = r"a request of 800 tokens takes up to \d+ MiB, and --memory is 30 MiB: give more, or --max-model-len 262"
    with pytest.raises(ConfigError, match=message):
        table.check(30, 800)
    with pytest.raises(ConfigError, match=r"MiB: give more$"):
        Admission.of(lambda length: RequestBytes(9 * UNIT, 0, 0), 10, host=False).check(3, 10)


def test_units():
    assert [units(n) for n in (0, 1, UNIT, UNIT + 1)] == [1, 1, 1, 2]


def test_the_largest_of_several_processes():
    tables = [Admission(4, (1, 5), (2, 2)), Admission(4, (3, 4), (1, 6))]
    assert Admission.largest(tables) == Admission(4, (3, 5), (2, 6))
