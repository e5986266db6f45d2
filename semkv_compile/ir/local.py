"""Running a found-stage body with attention that reads its own token only: the rest must treat tokens one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from semkv.ir.ops import attention
from semkv.ir.recurrence import local_recurrence, recur

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative difference up to which two ways of computing the same token count as equal: routing sorts tokens, and a sum
in another order rounds differently."""

RUN_ERRORS = (RuntimeError, IndexError, ValueError, AssertionError)
"""What a graph that does not fit its inputs raises."""


def local_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A stand-in for attention that reads its own token only, and all three of its operands.

    q [B, Hq, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv] -> [B, Hq, T, Dv].
    """
    group = q.shape[1] // v.shape[1]
    own = v.repeat_interleave(group, 1)
    score = (q * k.repeat_interleave(group, 1)).mean(-1, keepdim=True)
    return own + own.new_tensor(0.5) * torch.tanh(score).to(own.dtype)


class LocalInterpreter(Interpreter):
    """Runs a found-stage body with token-local attention and token-local recurrences.

    Parameters
    ----------
    module: the body.
    edit: called with each node and its value; what it returns takes the value's place.
    """

    def __init__(self, module: GraphModule, edit: Callable[[Node, Any], Any] | None = None) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.edit = edit

    def call_function(self, target, args, kwargs):
        if target == attention:
            out = local_attention(*args[:3])
            chosen = kwargs.get("chosen")  # of its own token only, by the stand-in of what chose
            return out if chosen is None else out + 0.1 * chosen[:, None, :, :1].to(out.dtype)
        if target is recur:
            return local_recurrence(args[0], args[2])
        return super().call_function(target, args, kwargs)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        return value if self.edit is None else self.edit(n, value)


def run_locally(
    body: GraphModule, ids: Tensor, positions: Tensor, edit: Callable[[Node, Any], Any] | None = None
) -> Tensor:
    """What the body returns for ids and positions [B, T] when attention is token-local."""
    result = LocalInterpreter(body, edit).run(ids, positions)
    while isinstance(result, (tuple, list)):
        (result,) = result
    return result


def close(left: Tensor, right: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether two results have one shape and differ by rounding only. dtype: in which they were computed; default: their own."""
    if left.shape != right.shape:
        return False
    if not left.numel():
        return True
    scale = float(right.abs().max().clamp_min(1e-6))
    return float((left - right).abs().max()) <= TOLERANCE.get(dtype or left.dtype, 1e-4) * scale
