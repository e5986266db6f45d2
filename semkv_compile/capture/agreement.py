"""The captured graph against the model itself, run at sizes that export did not see: the last check of a capture.

Guards say what export knows that it assumed. One row and one token it takes for granted, and a constant that the model's Python
made from a size by other means is in no guard.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from semkv.capture.reach import reachable
from semkv.errors import CaptureError
from semkv.ir.local import RUN_ERRORS, TOLERANCE

LONGEST_RUN = 160
"""Tokens of the longest comparison."""

AFFORDED = 2 * 10**10
"""Parameters times tokens of the longest comparison: about a second on one core, for the model and the graph."""

DEVIANT_TOKENS = {torch.float64: 0.0, torch.float32: 0.02, torch.float16: 0.25, torch.bfloat16: 0.25}
"""Share of the tokens of the longest comparison that may differ: where two experts score nearly the same, rounding chooses."""

FAR_TOKENS = 3


class Agreement:
    """Compares the logits of `model` and `graph`, both functions of ids and positions [B, T] int64. recurrent: whether they have
    recurrences, which are computed in float32 whatever the model's dtype, and in other pieces."""

    def __init__(
        self, name: str, model: nn.Module, graph: GraphModule, vocab_size: int, *, recurrent: bool = False
    ) -> None:
        self.recurrent = recurrent
        self.name, self.model, self.graph, self.vocab_size = name, model, graph, vocab_size
        tensor = next(model.parameters())
        self.device, self.parameters = tensor.device, sum(p.numel() for p in model.parameters())

    def reach(self, context: int | None) -> tuple[int | None, str | None]:
        """The context up to which the graph reads its position input, and why it ends there."""
        ids = self._ids(1, 1)
        return reachable(lambda positions: self.graph(ids, positions), context, self.device)

    def check(self, context: int | None, shortest: int, *, batched: bool, far: bool) -> str:
        """Compare at one token, at a few rows, at many tokens, and far out; a note that says where.

        Parameters
        ----------
        context: positions that there are; None where that is not known.
        shortest: tokens that the longest comparison has at least, where the context has them.
        batched: whether the graph takes several rows.
        far: whether both read their positions from the input.

        Raises
        ------
        CaptureError: they differ, or the graph fails where the model does not.
        """
        longest = min(max(shortest, AFFORDED // self.parameters), LONGEST_RUN, context or LONGEST_RUN)
        sizes = [(1, 1), (3 if batched else 1, 5), (1, longest)]
        compared = [f"{rows} x {length}" for rows, length in sizes if self._agree(rows, length, 0)]
        if far and context is not None and context > longest + FAR_TOKENS:
            start = context - FAR_TOKENS
            if self._agree(1, FAR_TOKENS, start):
                compared.append(f"1 x {FAR_TOKENS} at position {start}")
        return f"equal to the model at {', '.join(compared)} tokens"

    def _ids(self, rows: int, length: int) -> Tensor:
        generator = torch.Generator(device="cpu").manual_seed(0)
        ids = torch.randint(
            0, self.vocab_size, (rows, length), generator=generator, dtype=torch.int64, device=torch.device("cpu")
        )
        return ids.to(self.device)

    def _agree(self, rows: int, length: int, start: int) -> bool:
        """Whether both ran and agree; False where the model itself does not run."""
        ids = self._ids(rows, length)
        positions = torch.arange(start, start + length, dtype=torch.int64, device=self.device)
        positions = positions.expand(rows, length).contiguous()
        try:
            expected = self.model(ids, positions)
        except Exception:  # the model's own code, which may raise anything where it does not serve such an input
            return False
        where = f"{rows} rows of {length} tokens" if rows > 1 else f"{length} tokens"
        where += f" at position {start}" if start else ""
        try:
            result = self.graph(ids, positions)
        except RUN_ERRORS as error:
            raise CaptureError(
                f"the graph that export made of {self.name} fails at {where}, where the model does not: {error}"
            ) from error
        dtype = torch.float32 if self.recurrent and expected.dtype == torch.float64 else expected.dtype
        share = _deviant(result, expected, dtype)
        if share > (DEVIANT_TOKENS.get(dtype, 0.02) if length > 5 else 0.0):
            if _deviant(self.model(ids, positions), expected, dtype):
                return False  # it draws random numbers: no run of it is another
            raise CaptureError(
                f"the graph that export made of {self.name} is not the model at {where}: the logits of {share:.0%} of the "
                "tokens differ. Its forward does at this size, or at these positions, what it does not do at others, and "
                "export noted no condition; write it with tensor operations, without Python branches on sizes"
            )
        return True


def _deviant(result: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """The share of the tokens whose logits differ by more than rounding in `dtype`."""
    if result.shape != expected.shape:
        return 1.0
    same = (result == expected) | (result.isnan() & expected.isnan())
    difference = (result - expected).abs().masked_fill(same, 0.0)
    finite = expected.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(1e-6)
    token = difference.amax(-1) <= TOLERANCE.get(dtype, 1e-4) * finite
    return float((~token).double().mean())
