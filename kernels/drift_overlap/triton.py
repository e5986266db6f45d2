"""Drift overlap on the device, without asking the host: a selection of the k best, then the share that they have of the baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.drift_overlap.template import shared_fraction
from semkv.kernels.generation import Launch
from semkv.kernels.selection.triton import select_launches

BLOCK = 1024


def drift_overlap_launches(
    weights: Tensor, baseline: Tensor, k: int, *, block: int = 256
) -> tuple[Tensor, list[Launch]]:
    """The result of `drift_overlap_reference` and the launches that write it; weights float32, `block` tokens a program of selection."""
    if baseline.dtype != torch.bool or baseline.shape != weights.shape:
        raise InputError(
            f"baseline is {baseline.dtype} {tuple(baseline.shape)}; expected torch.bool {tuple(weights.shape)}, like the weights"
        )
    pivots, tokens = weights.shape
    threshold = weights.new_full((pivots,), float("-inf"))
    cost = torch.ones((pivots, tokens), dtype=torch.int32, device=weights.device)
    (_, chosen), launches = select_launches(weights[:, None], threshold, cost, k, block=block)
    out = weights.new_empty(pivots)
    arguments: dict[str, Tensor | float | None] = {
        "p_chosen": chosen.view(torch.int8),
        "p_baseline": baseline.contiguous().view(torch.int8),
        "p_out": out,
        "tokens": tokens,
    }
    return out, [*launches, Launch(shared_fraction, (pivots,), arguments, {"BLOCK": BLOCK}, 4, 1)]


def drift_overlap_triton(weights: Tensor, baseline: Tensor, k: int, *, block: int = 256) -> Tensor:
    """What `drift_overlap_reference` computes, on the device of `weights`."""
    out, launches = drift_overlap_launches(weights, baseline, k, block=block)
    for launch in launches:
        launch.run()
    return out
