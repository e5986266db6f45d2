"""Size expressions and guards, without an export."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import sympy
import torch
from torch import nn
from torch.utils._sympy.functions import CeilToInt, FloorDiv, FloorToInt, IntTrueDiv, Max, Min, Mod

from semkv.capture.agreement import Agreement
from semkv.capture.guards import EVERY, LONGEST, Guard, Guards, lengths_up_to
from semkv.capture.reach import FARTHEST, reachable
from semkv.capture.sizes import Evaluator, UnknownExpressionError, in_words
from semkv.errors import CaptureError

ROWS, TOKENS, OTHER = (sympy.Symbol(name, integer=True, positive=True) for name in ("s1", "s2", "u0"))
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("expression", "python", "words"),
    [
        (sympy.Eq(FloorDiv(TOKENS + 63, 64), 1), lambda b, t: (t + 63) // 64 == 1, "((tokens + 63) // 64) == 1"),
        (sympy.Ne(Mod(TOKENS * ROWS, 50), 0), lambda b, t: t * b % 50 != 0, "((rows * tokens) % 50) != 0"),
        (sympy.Le(Max(TOKENS, ROWS) - Min(TOKENS, 7), 30), lambda b, t: max(t, b) - min(t, 7) <= 30, None),
        (
            sympy.Lt(CeilToInt(IntTrueDiv(TOKENS, 3)), FloorToInt(IntTrueDiv(TOKENS, 2))),
            lambda b, t: -(-t // 3) < t // 2,
            None,
        ),
        (sympy.Or(sympy.Eq(TOKENS, 5), sympy.Ge(TOKENS**2, 400)), lambda b, t: t == 5 or t * t >= 400, None),
        (sympy.Not(sympy.Eq(Mod(TOKENS, 3), 0)), lambda b, t: t % 3 != 0, "(tokens % 3) != 0"),
        (sympy.true, lambda b, t: True, "True"),
    ],
)
def test_expressions_are_evaluated_as_python_would(expression, python, words) -> None:
    lengths = np.arange(1, 200)
    for rows in (1, 2, 9):
        values = np.broadcast_to(Evaluator({ROWS: rows, TOKENS: lengths})(expression), lengths.shape)
        assert values.tolist() == [python(rows, int(length)) for length in lengths]
    if words:
        assert in_words(expression, {ROWS: "rows", TOKENS: "tokens"}) == words


def test_what_divides_by_zero_does_not_hold() -> None:
    lengths = np.arange(60, 68)
    for relation in (sympy.Ge, sympy.Le, sympy.Ne):
        values = Evaluator({TOKENS: lengths})(relation(FloorDiv(640, FloorDiv(TOKENS, 64)), 3))
        assert values.tolist() == [False] * 4 + [relation is not sympy.Le] * 4


def test_unknown_functions_and_symbols_are_no_values() -> None:
    for expression in (sympy.Gt(sympy.Function("strange")(TOKENS), 2), sympy.Gt(TOKENS, OTHER)):
        with pytest.raises(UnknownExpressionError):
            Evaluator({TOKENS: 3})(expression)


def exported(*conditions: sympy.Basic) -> SimpleNamespace:
    """What an export of one input [s1, s2] looks like to `Guards`."""
    places = SimpleNamespace(maybe_user_loc="if so:  # model.py:7 in forward", framework_loc=None)
    environment = SimpleNamespace(
        var_to_sources={ROWS: [SimpleNamespace(idx=0)], TOKENS: [SimpleNamespace(idx=1)]},
        guards=[SimpleNamespace(expr=condition, sloc=places) for condition in conditions],
    )
    value = SimpleNamespace(fake_mode=SimpleNamespace(shape_env=environment))
    node = SimpleNamespace(op="placeholder", meta={"val": value})
    return SimpleNamespace(range_constraints={}, graph=SimpleNamespace(nodes=[node]))


def test_guards_are_evaluated_at_every_length() -> None:
    guards = Guards(exported(TOKENS < 70_000, sympy.Ne(TOKENS, 66_000), sympy.Ne(Mod(TOKENS, 65_537), 0)))
    lengths = lengths_up_to(131_072)
    assert lengths.tolist() == list(range(2, 131_073))
    holds = guards.holds(2, lengths)
    assert lengths[~holds].tolist() == [65_537, 66_000, *range(70_000, 131_073)]
    assert str(guards.broken(2, 66_000)) == "`tokens != 66000` (model.py:7 in forward)"


def test_lengths_without_a_declared_context_go_to_the_largest() -> None:
    lengths = lengths_up_to(None)
    assert lengths[: EVERY - 1].tolist() == list(range(2, EVERY + 1))
    assert {2**24 - 1, 2**24, 2**24 + 1, LONGEST} <= set(lengths[EVERY - 1 :].tolist())
    assert lengths_up_to(3_000_000)[-1] == 3_000_000


@pytest.mark.parametrize(
    ("condition", "number"),
    [(ROWS <= 8, 9), (sympy.Ne(ROWS, 77), 77), (sympy.Ne(Mod(ROWS * TOKENS, 64), 0), None), (TOKENS < 9, None)],
)
def test_a_guard_on_rows_is_found_with_the_rows_that_break_it(condition, number) -> None:
    found = Guards(exported(condition)).row_breaker(2, lengths_up_to(512))
    if condition.has(Mod):
        assert found is not None
        assert 2 < found[1] < 65
    else:
        assert (found and found[1]) == number


def test_a_guard_on_anything_but_sizes_is_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"export assumed `u0 < tokens` .*, which cannot be evaluated .*: u0 is no number"
    ):
        Guards(exported(sympy.Lt(OTHER, TOKENS)))
    assert isinstance(Guards(exported(TOKENS > 1)).guards[0], Guard)


def test_the_last_position_that_can_be_read_is_found() -> None:
    def table_of(size):
        def run(positions):
            if int(positions.max()) >= size:
                raise IndexError("index out of range\nmore")

        return run

    for size in (1, 2, 64, 65, 4095):
        assert reachable(table_of(size), 4096, CPU) == (size, f"position {size} cannot be read (index out of range)")
        assert reachable(table_of(size), None, CPU)[0] == size
    assert reachable(table_of(4096), 4096, CPU) == (4096, None)
    assert reachable(table_of(FARTHEST), None, CPU) == (None, None)


class Scored(nn.Module):
    """Logits that follow from ids and positions, `special` where `when` says so."""

    def __init__(self, when) -> None:
        super().__init__()
        self.weight, self.when = nn.Parameter(torch.ones(7)), when

    def forward(self, ids, positions):
        logits = torch.nn.functional.one_hot(ids, 7) * self.weight + positions[..., None]
        return logits + 5 if self.when(ids, positions) else logits


@pytest.mark.parametrize(
    ("when", "message"),
    [
        (
            lambda ids, positions: ids.shape[0] == 3,
            "of Scored is not the model at 3 rows of 5 tokens: the logits of 100%",
        ),
        (lambda ids, positions: ids.shape[1] == 160, "is not the model at 160 tokens"),
        (lambda ids, positions: int(positions.max()) > 900, "is not the model at 3 tokens at position 997"),
    ],
)
def test_a_graph_that_is_not_the_model_at_some_size_is_refused(when, message) -> None:
    model, graph = Scored(when), Scored(lambda ids, positions: False)
    with torch.no_grad(), pytest.raises(CaptureError, match=message):
        Agreement("Scored", model, graph, 7).check(1000, 41, batched=True, far=True)
    with torch.no_grad():
        note = Agreement("Scored", graph, graph, 7).check(1000, 41, batched=True, far=True)
    assert note == "equal to the model at 1 x 1, 3 x 5, 1 x 160, 1 x 3 at position 997 tokens"
