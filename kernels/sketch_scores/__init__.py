"""Scores of folded tokens from their codes alone: sums of numbers that codes look up in a query's tables."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.kernels.cpp import compiler
from semkv.kernels.sketch_scores.cpp import lookup_library, sketch_logits_cpp, together
from semkv.kernels.sketch_scores.reference import sketch_logits_reference


def sketch_logits(tables: Tensor, codes: Tensor) -> Tensor:
    """`sketch_logits_reference`: in C++ for float32 on a CPU, where there is a compiler."""
    if (
        tables.device.type == "cpu"
        and tables.dtype == torch.float32
        and not tables.requires_grad
        and compiler() is not None
        and lookup_library(together(tables.shape[1])).failure() is None
    ):
        return sketch_logits_cpp(tables, codes)
    return sketch_logits_reference(tables, codes)


__all__ = ["sketch_logits", "sketch_logits_reference"]
