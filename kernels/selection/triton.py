"""Selection under a budget on the device, without asking the host: what is launched for given tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.generation import Launch
from semkv.kernels.selection.template import DIGITS, PASSES, digit_sums, mark_chosen, tie_costs, unit_keys

MAX_ALLOWANCE = (1 << 31) - 1
ROWS = 4
CHUNK = 128


def select_launches(
    score: Tensor, threshold: Tensor, cost: Tensor, allowance: int, *, block: int = 256
) -> tuple[tuple[Tensor, Tensor], list[Launch]]:
    """The two results of `select_reference` and the launches that write them; `block` units a program.

    score and threshold float32, cost int32.
    """
    q_heads, tokens, units = score.shape
    kv_heads = cost.shape[0]
    if score.dtype != torch.float32 or cost.dtype != torch.int32:
        raise InputError(f"score is {score.dtype} and cost {cost.dtype}; expected torch.float32 and torch.int32")
    if q_heads % kv_heads:
        raise InputError(f"{q_heads} query heads for {kv_heads} KV heads; expected a multiple")
    if not 0 <= allowance <= MAX_ALLOWANCE:
        raise InputError(f"allowance is {allowance}; expected 0 to {MAX_ALLOWANCE}: give costs in a larger unit")
    group, blocks = q_heads // kv_heads, -(-units // block)
    score, threshold, cost = score.contiguous(), threshold.contiguous(), cost.contiguous()
    key = torch.empty((kv_heads, units), dtype=torch.int64, device=score.device)
    sums = torch.zeros((PASSES.value, kv_heads, DIGITS.value), dtype=torch.int64, device=score.device)
    ties = torch.empty((kv_heads, blocks), dtype=torch.int64, device=score.device)
    zoom = torch.empty(score.shape, dtype=torch.int8, device=score.device)
    chosen = torch.empty((kv_heads, units), dtype=torch.int8, device=score.device)

    grid = (kv_heads, blocks)
    asked: dict[str, Tensor | float | None] = {"p_score": score, "p_threshold": threshold}
    paid: dict[str, Tensor | float | None] = {"p_key": key, "p_cost": cost, "p_sums": sums}
    sizes: dict[str, Tensor | float | None] = {"units": units, "allowance": allowance}
    rows = {"GROUP": group, "ROWS": ROWS, "BLOCK": block}
    counted: dict[str, Tensor | float | None] = {"tokens": tokens, "units": units}
    launches = [Launch(unit_keys, grid, {**asked, "p_key": key, **counted}, rows, 4, 1)]
    for number in range(PASSES.value):
        launches.append(Launch(digit_sums, grid, {**paid, **sizes}, {"PASS": number, "BLOCK": block}, 4, 1))
    launches.append(Launch(tie_costs, grid, {**paid, "p_ties": ties, **sizes}, {"BLOCK": block}, 4, 1))
    marks: dict[str, Tensor | float | None] = {
        **asked,
        **paid,
        "p_ties": ties,
        "p_zoom": zoom,
        "p_chosen": chosen,
        **counted,
        "allowance": allowance,
    }
    launches.append(Launch(mark_chosen, grid, marks, {**rows, "CHUNK": CHUNK}, 4, 1))
    return (zoom.view(torch.bool), chosen.view(torch.bool)), launches


def select_triton(
    score: Tensor, threshold: Tensor, cost: Tensor, allowance: int, *, block: int = 256
) -> tuple[Tensor, Tensor]:
    """What `select_reference` chooses, on the device of `score`."""
    out, launches = select_launches(score, threshold, cost, allowance, block=block)
    for launch in launches:
        launch.run()
    return out
