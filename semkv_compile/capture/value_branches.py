"""Loops over the places at which a value was found, as loops over every place: what makes a graph of code that branches on values.

Experts are usually written as a loop over those that some token chose (`hit.nonzero()`, and inside it `torch.where(chosen)`). Which ones
that are is a value. A loop over all of them computes the same where a turn without a token changes nothing, which whoever uses this
must prove by running both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

FINDERS: frozenset[Callable[..., Any]] = frozenset({torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere})
"""Functions that say where a tensor is not zero."""

SEVERAL = 2
"""Tokens that a place is taken to have: sizes of 0 and 1 are other branches of PyTorch's own code, which change no number."""


class EveryPlace(TorchFunctionMode):
    """While entered, a tensor whose sizes are no number of tokens is found to be nonzero at every place.

    Such places are known numbers, as is what is computed of them; where the code indexes with one, the graph has the number.
    Where a tensor of tokens is not zero stays a question to the graph; that some tokens are found is assumed.

    Parameters
    ----------
    without: places that are left out.

    Attributes
    ----------
    place: the last that the code used as an index; None before the first.
    """

    def __init__(self, without: Sequence[int] = ()) -> None:
        super().__init__()
        self.without = sorted(set(without))
        self.place: int | None = None
        self._known: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if tensors and all(self._knows(x) for x in tensors):
            with _disable_current_modes():
                made = func(*args, **kwargs)
            if isinstance(made, int):
                self.place = made
            return self._kept(made)
        finds = func in FINDERS or (func in (torch.where, Tensor.where) and len(args) + len(kwargs) == 1)
        if finds and tensors and _one_axis(tensors[0]):
            with _disable_current_modes():
                everywhere = torch.ones(tuple(tensors[0].shape), dtype=torch.bool, device="cpu")
                everywhere.view(-1)[self.without] = False
                made = func(everywhere, *args[1:], **kwargs)
            return self._kept(made)
        if func is Tensor.__getitem__:
            args = (args[0], self._as_numbers(args[1]))
        made = func(*args, **kwargs)
        if finds:
            for x in pytree.tree_leaves(made):
                if not isinstance(x.shape[0], int):
                    torch._check(x.shape[0] >= SEVERAL)
        return made

    def _knows(self, x: Any) -> bool:
        return isinstance(x, Tensor) and self._known.get(id(x)) is x

    def _kept(self, made: Any) -> Any:
        for x in pytree.tree_leaves(made):
            if isinstance(x, Tensor):
                self._known[id(x)] = x  # held, so that no other tensor gets its identity
        return made

    def _as_numbers(self, index: Any) -> Any:
        if isinstance(index, tuple):
            return tuple(self._as_numbers(each) for each in index)
        if self._knows(index) and index.dim() == 0:
            with _disable_current_modes():
                self.place = int(index)
            return self.place
        return index


def _one_axis(x: Tensor) -> bool:
    """Whether no size depends on the tokens, and one axis at most has several places."""
    return all(isinstance(size, int) for size in x.shape) and sum(size > 1 for size in x.shape) <= 1


__all__ = ["EveryPlace"]
