"""Selection under a budget in C++ on a CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from semkv.kernels.cpp import Library, compiler, library, team

TEMPLATE = Path(__file__).parent / "template.cpp"
MAX_ALLOWANCE = 1 << 62


class _Call(ctypes.Structure):
    """`Call` of the template, whose fields it names."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("score", "threshold", "cost", "keys", "partly", "chosen", "differ")),
        *((name, ctypes.c_int64) for name in ("heads", "rows", "units", "allowance", "threads")),
        ("parallel", ctypes.c_void_p),
    )  # fmt: skip


def selection_library() -> Library:
    """The object, the same for all sizes."""
    return library(TEMPLATE, {})


def answers(score: Tensor) -> bool:
    """Whether `select_cpp` chooses by these scores: on a CPU with a compiler. Waits for the compiler."""
    cpu = score.device.type == "cpu" and score.dtype == torch.float32
    return cpu and compiler() is not None and selection_library().failure() is None


def select_cpp(
    score: Tensor, threshold: Tensor, cost: Tensor | None, allowance: int, kv_heads: int
) -> tuple[Tensor, bool]:
    """The second result of `select_reference`, bool [Hkv, M], and whether some query head or token of a group does not want all of it.

    score float32 [Hq, T, M]; threshold float32 [Hq]; cost int64 [Hkv, M], None: 1 for each; 0 <= allowance <= `MAX_ALLOWANCE`. Raises
    `BuildError` where the kernel cannot be compiled.
    """
    q_heads, tokens, units = score.shape
    score, threshold = score.contiguous(), threshold.repeat_interleave(tokens).contiguous()
    cost = None if cost is None else cost.contiguous()
    keys = torch.empty(kv_heads, 2, units, dtype=torch.int32)
    partly, chosen = (torch.empty(kv_heads, units, dtype=torch.bool) for _ in range(2))
    differ = torch.empty(kv_heads, dtype=torch.bool)
    call = _Call(
        *(None if x is None else x.data_ptr() for x in (score, threshold, cost, keys, partly, chosen, differ)), kv_heads,
        q_heads // kv_heads * tokens, units, allowance, torch.get_num_threads(), team(),
    )  # fmt: skip
    selection_library().function("select_units")(ctypes.byref(call))
    return chosen, bool(differ.any())
