"""Size expressions that export records, over many sizes at once, and in words."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import sympy

Values = Any
"""An integer, float or truth value, or an array of them."""


class UnknownExpressionError(Exception):
    """The expression has a function or a symbol whose value is not known."""


def _folded(function: Callable[[Values, Values], Values]) -> Callable[..., Values]:
    return lambda *values: functools.reduce(function, values)


def _divided(function: Callable[[Values, Values], Values]) -> Callable[[Values, Values], Values]:
    """The division, NaN where the divisor is zero: no comparison with it holds, as Python would raise there."""

    def divide(left: Values, right: Values) -> Values:
        right = np.asarray(right)
        zero = right == 0
        result = function(left, np.where(zero, 1, right))
        return np.where(zero, np.nan, result) if np.any(zero) else result

    return divide


def _unequal(left: Values, right: Values) -> Values:
    return np.not_equal(left, right) & ~np.isnan(left) & ~np.isnan(right)


def _whole(function: Callable[[Values], Values]) -> Callable[[Values], Values]:
    return lambda value: function(value).astype(np.int64)


FUNCTIONS: dict[str, Callable[..., Values]] = {
    "Add": _folded(np.add),
    "Mul": _folded(np.multiply),
    "Max": _folded(np.maximum),
    "Min": _folded(np.minimum),
    **dict.fromkeys(("FloorDiv", "CleanDiv"), _divided(np.floor_divide)),
    **dict.fromkeys(("Mod", "PythonMod"), _divided(np.mod)),
    **dict.fromkeys(("IntTrueDiv", "FloatTrueDiv"), _divided(np.true_divide)),
    **dict.fromkeys(("Pow", "PowByNatural", "FloatPow"), lambda base, power: np.power(base, power)),
    **dict.fromkeys(("floor", "FloorToInt"), _whole(np.floor)),
    **dict.fromkeys(("ceiling", "CeilToInt"), _whole(np.ceil)),
    "TruncToInt": _whole(np.trunc),
    "ToFloat": lambda value: np.asarray(value, dtype=np.float64),
    "OpaqueUnaryFn_sqrt": np.sqrt,
    "OpaqueUnaryFn_log2": np.log2,
    "Identity": lambda value: value,
    "Abs": np.abs,
    "Where": np.where,
    "And": _folded(np.logical_and),
    "Or": _folded(np.logical_or),
    "Not": np.logical_not,
    "Equality": np.equal,
    "Unequality": _unequal,
    "StrictLessThan": np.less,
    "LessThan": np.less_equal,
    "StrictGreaterThan": np.greater,
    "GreaterThan": np.greater_equal,
}
"""What a sympy function of this name computes, of numpy arrays."""


class Evaluator:
    """Values of expressions for one assignment of sizes; what expressions share is computed once.

    Parameters
    ----------
    sizes: for each symbol an integer, or an int64 array; arrays broadcast against each other.
    """

    def __init__(self, sizes: Mapping[sympy.Symbol, Values]) -> None:
        self.done: dict[sympy.Basic, Values] = dict(sizes)

    def __call__(self, expression: sympy.Basic) -> Values:
        """The value of the expression.

        Raises
        ------
        UnknownExpressionError: it has a function or a symbol that is not known.
        """
        if expression not in self.done:
            with np.errstate(over="raise"):
                self.done[expression] = self._compute(expression)
        return self.done[expression]

    def _compute(self, expression: sympy.Basic) -> Values:
        if isinstance(expression, (sympy.logic.boolalg.BooleanAtom, bool)):
            return np.bool_(bool(expression))
        if isinstance(expression, sympy.Integer):
            return np.int64(int(expression))
        if isinstance(expression, sympy.Number) and expression.is_finite:
            return np.float64(float(expression))
        name = type(expression).__name__
        if name not in FUNCTIONS or (name == "Pow" and not expression.args[1].is_nonnegative):
            raise UnknownExpressionError(f"{expression}")
        return FUNCTIONS[name](*map(self, expression.args))


SYMBOLS = {"Equality": "==", "Unequality": "!=", "LessThan": "<=", "StrictLessThan": "<", "GreaterThan": ">="}
SYMBOLS |= {"StrictGreaterThan": ">", "FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%"}
SYMBOLS |= {"IntTrueDiv": "/", "FloatTrueDiv": "/", "Mul": "*", "And": "and", "Or": "or", "Add": "+"}


def in_words(expression: sympy.Basic, names: Mapping[sympy.Symbol, str], inner: bool = False) -> str:
    """The expression as Python would write it, its symbols by `names`."""
    if expression in names:
        return names[expression]
    kind = type(expression).__name__
    if kind not in SYMBOLS:
        if not expression.args:
            return str(expression)
        return f"{kind.lower()}({', '.join(in_words(part, names) for part in expression.args)})"
    parts = expression.args
    if kind == "Add":
        parts = sorted(parts, key=lambda part: part.is_number)
    text = f" {SYMBOLS[kind]} ".join(in_words(part, names, inner=True) for part in parts)
    return f"({text})" if inner else text
