"""What templates of this folder know numbers by (`numbers.h`)."""

from __future__ import annotations

from pathlib import Path

import torch

NUMBERS = Path(__file__).parent / "numbers.h"
"""What comes before templates that read or write numbers of several kinds."""
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3}
"""`Kind` of the header."""
FLOATS = tuple(dtype for dtype in KINDS if dtype.is_floating_point)
CODES = (torch.uint8,)
SCALES = (torch.float16,)

__all__ = ["CODES", "FLOATS", "KINDS", "NUMBERS", "SCALES"]
