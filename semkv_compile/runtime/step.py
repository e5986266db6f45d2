"""What components see of a step besides the query: the row's tokens, its other layers and heads, and what it remembers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from semkv.ir.site import AttentionSite
from semkv.runtime.views import PartView

CHOSEN = "chosen"
"""Of `Step.passing`: the places, whole numbers [T, n], of the tokens that the model's own indexer chose; below 0: none."""


@dataclass
class Step:
    """One site's turn in a step over new tokens of a row.

    Attributes
    ----------
    ids: int64 [T], the new tokens. tokens: of the row before them.
    site: the whole site, of which a component may see a part of the heads. q: all of its queries [Hq, T, D].
    parts: the memories of its store, in the order of their heads. caps: device bytes that each of them may hold in all.
    notes: what the row remembers between steps, by name; tensors are replaced, never written in place.
    passing: what earlier layers, or `Plan.before`, left for later ones in this step.
    kernels: whether Triton's kernels score and select, on the device of `q`, where there are some.
    """

    ids: Tensor
    tokens: int
    site: AttentionSite
    q: Tensor
    parts: tuple[PartView, ...] = ()
    caps: tuple[float, ...] = ()
    notes: dict[str, Tensor] = field(default_factory=dict)
    passing: dict[str, object] = field(default_factory=dict)
    kernels: bool = False

    @classmethod
    def alone(cls, site: AttentionSite, q: Tensor) -> Step:
        """A step in which nothing else is known: for components that look at the query only."""
        return cls(torch.zeros(q.shape[1], dtype=torch.int64, device="cpu"), 0, site, q)
