"""Tuned layouts: measured, kept by GPU and problem, read back, and refused where they are damaged."""

from __future__ import annotations

import pytest
import torch

from semkv.errors import ConfigError
from semkv.kernels.mixed_attention.configuration import Configuration
from semkv.kernels.tuning import Tuning, problem_name

CPU = torch.device("cpu")
PROBLEM = (torch.bfloat16, 128, 128, 4)


def test_layouts_are_kept_by_device_and_problem(tmp_path):
    path = tmp_path / "folder" / "kernels.json"
    assert Tuning.load(path).layout(CPU, PROBLEM) == ()
    known = Tuning({}).with_layout(CPU, PROBLEM, Configuration(block=32, stages=3))
    known.save(path)
    assert Tuning.load(path).layout(CPU, PROBLEM) == (32, 4, 3, 0, 0)
    assert Tuning.load(path).layout(CPU, (torch.bfloat16, 64, 128, 4)) == ()
    assert problem_name(PROBLEM) == "bfloat16, head dims 128 and 128, group 4"


def test_the_later_of_two_is_taken():
    old = Tuning({"A": {"x": Configuration(block=16)}, "B": {"x": Configuration(block=32)}})
    new = Tuning({"A": {"x": Configuration(block=64), "y": Configuration()}})
    assert old.merged(new).to_json() == {
        "A": {"x": vars(Configuration(block=64)), "y": vars(Configuration())},
        "B": {"x": vars(Configuration(block=32))},
    }


@pytest.mark.parametrize(
    "value", [[], {"GPU": 3}, {"GPU": {"x": {"block": -1}}}, {"GPU": {"x": {"width": 1}}}, {"GPU": {"x": 3}}]
)
def test_what_is_no_table_is_refused(value):
    with pytest.raises(ConfigError, match=r"somewhere: no layouts of kernels .*; delete it and tune again"):
        Tuning.from_json(value, "somewhere")


def test_the_fastest_candidate_is_found(on_device):
    pytest.importorskip("triton", reason='kernels need triton: pip install -e ".[triton]"')
    from semkv.kernels.mixed_attention.tune import tune

    # 16 splits are 16 programs and a merge, which in the interpreter run one after the other.
    one, many = Configuration(block=64, splits=1), Configuration(block=16, splits=16)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    best, times = on_device(tune, (torch.float32, 16, 16, 2), 1, 256, device, candidates=(many, one), repeats=1)
    assert set(times) == {one, many}
    assert best == min(times, key=times.get)
    assert all(time > 0 for time in times.values())
