"""What a module's forward writes into its own attributes: notes of its last run, which are no settings of the next."""

from __future__ import annotations

import dis
import inspect
from functools import cache
from types import CodeType, FunctionType

from torch import nn


@cache
def written_by_forward(kind: type[nn.Module]) -> frozenset[str]:
    """Names of the attributes that `forward` of the class, and the methods that it names, assign."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        function = inspect.unwrap(getattr(kind, name, None))
        if name in seen or not isinstance(function, FunctionType):
            continue
        seen.add(name)
        for code in _codes(function.__code__):
            found.update(str(each.argval) for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
            waiting.extend(code.co_names)
    return frozenset(found)


def _codes(code: CodeType) -> list[CodeType]:
    """A function's code and that of the functions in it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return [code, *(deep for each in inner for deep in _codes(each))]


__all__ = ["written_by_forward"]
