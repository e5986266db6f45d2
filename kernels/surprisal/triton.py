"""Surprisal on the device: what is launched for given tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.generation import Launch
from semkv.kernels.surprisal.template import merge_vocabulary, vocabulary_partials

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MERGED_TOKENS = 128


@dataclass(frozen=True)
class Configuration:
    """Sides of a tile, and among how many programs the vocabulary is split for each block of tokens."""

    tokens: int = 64
    vocabulary: int = 64
    hidden: int = 64
    splits: int = 8
    warps: int = 4
    stages: int = 3


def surprisal_launches(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    softcap: float = 0.0,
    configuration: Configuration | None = None,
) -> tuple[Tensor, list[Launch]]:
    """The result float32 [n] of `surprisal_reference` and the launches that write it; accumulated in float32.

    A target outside the vocabulary is the caller's fault: its surprisal is not defined.
    """
    if hidden.dtype not in DTYPES:
        raise InputError(f"hidden is {hidden.dtype}; the kernel computes in float16, bfloat16 or float32: cast it")
    if hidden.shape[1] != weight.shape[1]:
        raise InputError(f"hidden has {hidden.shape[1]} numbers a token and weight {weight.shape[1]}; expected as many")
    configuration = configuration or Configuration()
    tokens, vocabulary = len(hidden), len(weight)
    tiles = -(-vocabulary // configuration.vocabulary)
    splits = -(-tiles // -(-tiles // min(configuration.splits, tiles)))  # every split has a tile
    out, logit = (hidden.new_empty(tokens, dtype=torch.float32) for _ in range(2))
    top, mass = (hidden.new_empty((splits, tokens), dtype=torch.float32) for _ in range(2))
    arguments: dict[str, Tensor | float | None] = {
        "p_hidden": hidden.contiguous(),
        "p_weight": weight.contiguous(),
        "p_bias": None if bias is None else bias.contiguous(),
        "p_target": targets.contiguous(),
        "p_logit": logit,
        "p_top": top,
        "p_mass": mass,
        "tokens": tokens,
        "vocabulary": vocabulary,
        "softcap": float(softcap),
    }
    constants = {
        "HIDDEN": hidden.shape[1],
        "BIAS": int(bias is not None),
        "SOFTCAP": int(softcap != 0),
        "SPLITS": splits,
        "BLOCK_TOKENS": configuration.tokens,
        "BLOCK_VOCABULARY": configuration.vocabulary,
        "BLOCK_HIDDEN": configuration.hidden,
    }
    grid = (-(-tokens // configuration.tokens), splits)
    merged: dict[str, Tensor | float | None] = {
        "p_logit": logit,
        "p_top": top,
        "p_mass": mass,
        "p_out": out,
        "tokens": tokens,
    }
    return out, [
        Launch(vocabulary_partials, grid, arguments, constants, configuration.warps, configuration.stages),
        Launch(
            merge_vocabulary, (-(-tokens // MERGED_TOKENS),), merged, {"SPLITS": splits, "BLOCK": MERGED_TOKENS}, 4, 1
        ),
    ]


def surprisal_triton(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    softcap: float = 0.0,
    configuration: Configuration | None = None,
) -> Tensor:
    """What `surprisal_reference` computes, on the device of `hidden`."""
    out, launches = surprisal_launches(hidden, weight, targets, bias, softcap=softcap, configuration=configuration)
    for launch in launches:
        launch.run()
    return out
