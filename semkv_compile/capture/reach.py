"""How far positions go: tables that end, and assertions on positions, found by running one token far out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from semkv.ir.local import RUN_ERRORS, run_locally
from semkv.ir.program import Program
from semkv.passes.base import Pass, PassOptions

FARTHEST = 1 << 24
"""A model that declares no context is tried up to here: beyond it float32 does not tell positions apart."""


class FindReach(Pass):
    """The context shrinks to the positions that the program can read."""

    name = "reach"
    needs = "found"
    leaves = "found"
    after = ("dependence",)

    def run(self, program: Program, options: PassOptions) -> Program:
        """The program, `max_positions` at most what its tables of positions hold."""
        device = next((t.device for t in program.body.state_dict().values()), torch.device("cpu"))
        ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        with torch.no_grad():
            context, reason = reachable(lambda at: run_locally(program.body, ids, at), program.max_positions, device)
        note = f"reach: context {context or 'not declared'}" + (f", as {reason}" if reason else "")
        return program.evolve(note, max_positions=context)


def reachable(
    run: Callable[[Tensor], object], limit: int | None, device: torch.device
) -> tuple[int | None, str | None]:
    """The context up to which `run` does not raise, and why it ends; `limit` and None where that is far enough.

    Parameters
    ----------
    run: runs one token at positions [1, 1] int64 on `device`; it can run at position 0.
    limit: the declared context; None where none is.
    """

    def error_at(position: int) -> Exception | None:
        try:
            run(torch.tensor([[position]], dtype=torch.int64, device=device))
        except RUN_ERRORS as error:
            return error
        return None

    fits, fails = 0, (limit or FARTHEST) - 1
    last = error_at(fails)
    if last is None:
        return limit, None
    while fails - fits > 1:
        middle = (fits + fails) // 2
        error = error_at(middle)
        if error is None:
            fits = middle
        else:
            fails, last = middle, error
    return fails, f"position {fails} cannot be read ({str(last).strip().splitlines()[0]})"
