"""What `torch.export` assumed of sizes, evaluated over every size that a program may meet.

Export traces the forward once and notes each Python branch that it took, as a condition on the number of rows and tokens. The
graph is the model's only where all of them hold. Sizes of 1 are outside of this: export reasons about 2 and more, and one row
and one token are compared by execution (`agreement`, `dependence`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from semkv.capture.sizes import Evaluator, UnknownExpressionError, Values, in_words
from semkv.errors import CaptureError
from semkv.ir.graph import describe, reads_sizes_only

LONGEST = 1 << 31
"""Lengths from here on are none."""

EVERY = 1 << 20
"""Guards are evaluated at every length up to here, and beyond it around powers of two: what a guard can be (a comparison of sums,
products, quotients and remainders) has changed by then, or changes at a bound, or goes on as it did."""

MANY_ROWS = np.arange(2, 4097)
"""Rows of a batch that guards on rows are evaluated for, at a few lengths."""

ROWS = 16
"""The first so many of them are evaluated at many lengths."""

SOME = 4096
"""Those lengths: the first so many, and as many over the whole range."""

BLOCK = 1 << 16
"""Lengths that are evaluated at once."""

AXES = ("rows", "tokens")

VALUE_ASSERTIONS = ("aten::_assert_scalar", "aten::_assert_async", "aten::sym_constrain_range")

SELF_CHECKED = frozenset({torch.ops.aten.split_with_sizes.default, torch.ops.aten.split_with_sizes_copy.default})
"""Operators that take numbers as sizes and compare them with their tensor themselves."""

PACKAGE = Path(torch.__file__).parent


@dataclass(frozen=True)
class Guard:
    """A condition on sizes under which the graph is the model's.

    Attributes
    ----------
    condition: of the symbols in `axes`.
    axes: each symbol's axis of the input: 0 rows, 1 tokens.
    place: where in the model's code it was made; empty where unknown.
    """

    condition: sympy.Basic
    axes: dict[sympy.Symbol, int]
    place: str

    def depends_on(self, axis: int) -> bool:
        return any(self.axes[symbol] == axis for symbol in self.condition.free_symbols)

    def __str__(self) -> str:
        text = in_words(self.condition, {symbol: AXES[axis] for symbol, axis in self.axes.items()})
        return f"`{text}`" + (f" ({self.place})" if self.place else "")


class Guards:
    """All assumptions of an export; `CaptureError` where one is no condition on the sizes of the input."""

    def __init__(self, exported: ExportedProgram) -> None:
        environment = shape_environment(exported)
        sources = {} if environment is None else environment.var_to_sources
        self.axes = {symbol: axis for symbol, found in sources.items() if (axis := _axis(found)) is not None}
        self.guards = list(dict.fromkeys(self._collect(exported, environment)))
        for guard in self.guards:
            self._require_known(guard)

    def _collect(self, exported: ExportedProgram, environment: Any) -> Iterator[Guard]:
        for recorded in () if environment is None else environment.guards:
            yield self._guard(recorded.expr, _place(recorded.sloc))
        for node in exported.graph.nodes:
            condition = _asserted(node, environment)
            if condition is not None:
                yield self._guard(condition, describe(node))
        for symbol, bounds in exported.range_constraints.items():
            if symbol in self.axes:
                if bounds.lower > 2:
                    yield self._guard(sympy.Ge(symbol, int(bounds.lower)))
                if bounds.upper < LONGEST:
                    yield self._guard(sympy.Le(symbol, int(bounds.upper)))

    def _guard(self, condition: sympy.Basic, place: str = "") -> Guard:
        return _Hashable(condition, self.axes, place)

    def _require_known(self, guard: Guard) -> None:
        try:
            self.values(2, np.array([2, 3]))(guard.condition)
        except (UnknownExpressionError, FloatingPointError) as error:
            raise CaptureError(
                f"export assumed {guard}, which cannot be evaluated over all lengths: {error} is no number that follows from "
                "the input's sizes. Write the forward without Python branches on values"
            ) from error

    def values(self, rows: Values, lengths: Values) -> Evaluator:
        """Values of expressions of the export's symbols, where the input has these sizes."""
        return Evaluator({symbol: (rows, lengths)[axis] for symbol, axis in self.axes.items()})

    def holds(self, rows: int, lengths: np.ndarray) -> np.ndarray:
        """At which of `lengths` all of them hold for so many rows."""
        result = np.ones(lengths.shape, dtype=bool)
        for start in range(0, len(lengths), BLOCK):
            part = slice(start, start + BLOCK)
            values = self.values(rows, lengths[part])
            for guard in self.guards:
                result[part] &= values(guard.condition)
                if not result[part].any():
                    break
        return result

    def broken(self, rows: int, length: int) -> Guard:
        """The first guard that does not hold there."""
        values = self.values(rows, length)
        return next(guard for guard in self.guards if not bool(values(guard.condition)))

    def row_breaker(self, rows: int, lengths: np.ndarray) -> tuple[Guard, int] | None:
        """A guard that holds for `rows` at some length and not for another number of rows, and that number."""
        about_rows = [guard for guard in self.guards if guard.depends_on(0)]
        if not about_rows:
            return None
        some = lengths[np.unique(np.linspace(0, len(lengths) - 1, SOME).astype(int))]
        few = some[:: SOME // 16, None]
        for numbers, tried in ((MANY_ROWS, few), (MANY_ROWS[:ROWS], np.union1d(lengths[:SOME], some)[:, None])):
            given, other = self.values(rows, tried), self.values(numbers, tried)
            for guard in about_rows:
                broken = np.broadcast_to(given(guard.condition) & ~other(guard.condition), (len(tried), len(numbers)))
                if broken.any():
                    return guard, int(numbers[broken.any(0)][0])
        return None


class _Hashable(Guard):
    """Guards of one condition count once; a condition's first place is kept."""

    def __hash__(self) -> int:
        return hash(self.condition)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Guard) and self.condition == other.condition


def lengths_up_to(context: int | None) -> np.ndarray:
    """The lengths that guards are evaluated at: all of 2 to `context`, as far as `EVERY`, then some."""
    longest = LONGEST if context is None else context
    every = np.arange(2, min(longest, EVERY) + 1)
    powers = [1 << exponent for exponent in range(EVERY.bit_length() - 1, LONGEST.bit_length())]
    far = {power + step for power in powers for step in (-1, 0, 1)} | {longest}
    return np.concatenate([every, np.array(sorted(n for n in far if EVERY < n <= longest), dtype=np.int64)])


def shape_environment(exported: ExportedProgram) -> Any:
    """What export knows of symbols; None where no size is a symbol."""
    for node in exported.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return mode.shape_env
    return None


def _axis(sources: list[Any]) -> int | None:
    """The axis of an input, both of which are [rows, tokens], that a symbol is the size of."""
    return next((source.idx for source in sources if getattr(source, "idx", None) in (0, 1)), None)


def _place(location: Any) -> str:
    """`model.py:12, in forward`, where it is not in PyTorch itself."""
    if location.maybe_user_loc:
        text = str(location.maybe_user_loc).rpartition("# ")[2]
        return "" if "capture/export.py:" in text else text  # the caller of a forward whose source is not known
    frame = location.framework_loc
    path = Path(getattr(frame, "filename", ""))
    if not path.name or PACKAGE in path.parents:
        return ""
    return f"{path.name}:{frame.lineno}, in {frame.name}"


def _asserted(node: Node, environment: Any) -> sympy.Basic | None:
    """The condition on sizes that an assertion in the graph makes; None where there is none, or where something else checks it.

    Raises
    ------
    CaptureError: it is about the values of the tokens.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if not node.target.name().startswith(VALUE_ASSERTIONS):
        return None
    expression = _expression(node.args[0])
    if expression is not None and expression.free_symbols <= environment.var_to_sources.keys():
        return expression if isinstance(expression, sympy.logic.boolalg.Boolean) else None
    made = None if expression is None else expression.free_symbols - environment.var_to_sources.keys()
    if made is None or not made <= _checked_by_operators(node.graph, environment):
        _require_positions_only(node)
    return None


def _expression(value: Any) -> sympy.Basic | None:
    """A number or truth value of the graph as an expression; None for a tensor."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.expr
    return sympy.sympify(value) if isinstance(value, (bool, int, float)) else None


def _checked_by_operators(graph: Graph, environment: Any) -> set[sympy.Symbol]:
    """Numbers made in the graph that are sizes of what operators make, or that operators compare with sizes when they run."""
    checked = set(environment.size_like)
    for node in graph.nodes:
        if node.target in SELF_CHECKED:
            for size in node.args[1]:
                expression = _expression(size)
                checked |= expression.free_symbols if expression is not None else set()
    return checked


def _require_positions_only(node: Node) -> None:
    """Running the graph tells how far an assertion on positions alone holds; `CaptureError` for one on other values."""
    inputs = {source.name for source in _values_behind(node) if source.op == "placeholder"}
    if "positions" in inputs and "input_ids" not in inputs:
        return
    message = next((f": {text}" for text in node.args if isinstance(text, str)), "")
    raise CaptureError(
        f"{describe(node)} asserts something of values that follow from the tokens{message}. A program would not check it; "
        "remove the assertion, or check before the call"
    )


def _values_behind(node: Node) -> set[Node]:
    """What the node's value depends on, other than by size."""
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting.extend(() if reads_sizes_only(current) else current.all_input_nodes)
    return found
