"""Selection under a budget in C++ on a CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from semkv.kernels.addresses import address_of
from semkv.kernels.cpp import Library, compiler, library, team

TEMPLATE = Path(__file__).parent / "template.cpp"
SELECT = Path(__file__).parent / "select.h"
"""The choice itself, which comes before templates that choose."""
MAX_ALLOWANCE = 1 << 62
LANES = 16  # of the template


class _Call(ctypes.Structure):
    """`Call` of the template, whose fields it names."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("score", "threshold", "cost", "keys", "places", "chosen", "differ", "taken")
        ),
        *((name, ctypes.c_int64) for name in ("heads", "group", "tokens", "units", "allowance")),
        *((name, ctypes.c_int64) for name in ("head_stride", "group_stride", "token_stride", "threads")),
        ("parallel", ctypes.c_void_p),
    )


@cache
def selection_library() -> Library:
    """The object, the same for all sizes."""
    return library(TEMPLATE, {}, [SELECT])


def answers(score: Tensor) -> bool:
    """Whether `select_cpp` chooses by these scores: on a CPU with a compiler. Waits for the compiler."""
    cpu = score.device.type == "cpu" and score.dtype == torch.float32
    return cpu and compiler() is not None and selection_library().failure() is None


class Selection(NamedTuple):
    """chosen bool [Hkv, M]: the second result of `select_reference`; taken int64 [Hkv]: how many that are; differ: whether some query
    head or token of a group does not want all of it."""

    chosen: Tensor
    taken: Tensor
    differ: bool


def select_cpp(score: Tensor, threshold: Tensor, cost: Tensor | None, allowance: int, kv_heads: int) -> Selection:
    """What each KV head unfolds.

    score float32 [Hq, T, M], whose query heads may be views of one; threshold float32 [Hq]; cost int64 [Hkv, M], None: 1 for each;
    0 <= allowance <= `MAX_ALLOWANCE`. Raises `BuildError` where the kernel cannot be compiled, `InputError` for other tensors.
    """
    grouped = score.unflatten(0, (kv_heads, -1))
    units, threshold = score.shape[2], threshold.contiguous()
    grouped = grouped if units < 2 or grouped.stride(3) == 1 else grouped.contiguous()
    cost = None if cost is None else cost.contiguous()
    keys, places = torch.empty(2, kv_heads, units + LANES, dtype=torch.int32, device="cpu")
    chosen = torch.empty(kv_heads, units, dtype=torch.bool, device="cpu")
    differ = torch.empty(kv_heads, dtype=torch.bool, device="cpu")
    taken = torch.empty(kv_heads, dtype=torch.int64, device="cpu")
    made = (keys, places, chosen, differ, taken)
    call = _Call(
        address_of("scores", grouped, torch.float32, grouped.shape, dense=False),
        address_of("thresholds", threshold, torch.float32, score.shape[:1]),
        None if cost is None else address_of("costs", cost, torch.int64, (kv_heads, units)),
        *(x.data_ptr() for x in made),
        *grouped.shape,
        allowance,
        *grouped.stride()[:3],
        torch.get_num_threads(),
        team(),
    )
    selection_library().function("select_units")(ctypes.byref(call))
    return Selection(chosen, taken, bool(differ.any()))
