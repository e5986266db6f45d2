"""Span summaries on the device: what is launched for given tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.errors import InputError
from semkv.kernels.generation import Launch, padded
from semkv.kernels.span_summaries.template import summarise_spans

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BLOCK = 16
"""Tokens that are read at a time; spans are of tens."""


def span_summaries_launches(
    x: Tensor, starts: Tensor, lengths: Tensor, surprisal: Tensor | None = None, *, bounds: bool = True
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], list[Launch]]:
    """The results of `span_summaries_reference` (without `bounds` the mean alone) and the launch that writes them."""
    if x.dtype not in DTYPES:
        raise InputError(f"x is {x.dtype}; the kernel reads float16, bfloat16 or float32: cast it")
    (heads, tokens, dim), spans = x.shape, len(starts)
    mean = x.new_empty((heads, spans, dim), dtype=torch.float32)
    low, high = (torch.empty_like(mean), torch.empty_like(mean)) if bounds else (None, None)
    arguments: dict[str, Tensor | float | None] = {
        "p_x": x.contiguous(),
        "p_start": starts.contiguous(),
        "p_length": lengths.contiguous(),
        "p_surprisal": None if surprisal is None else surprisal.contiguous(),
        "p_mean": mean,
        "p_low": low,
        "p_high": high,
        "tokens": tokens,
        "spans": spans,
    }
    constants = {
        "DIM": dim,
        "WEIGHTED": int(surprisal is not None),
        "BOUNDS": int(bounds),
        "BLOCK": BLOCK,
        "BLOCK_DIM": padded(dim),
    }
    return (mean, low, high), [Launch(summarise_spans, (spans, heads), arguments, constants, 4, 1)]


def span_summaries_triton(
    x: Tensor, starts: Tensor, lengths: Tensor, surprisal: Tensor | None = None, *, bounds: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What `span_summaries_reference` computes, in float32, on the device of `x`."""
    out, launches = span_summaries_launches(x, starts, lengths, surprisal, bounds=bounds)
    for launch in launches:
        launch.run()
    return out
