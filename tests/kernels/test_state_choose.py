"""`semkv::choose` and `semkv::choose_each` against loops, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from semkv.ir import state_ops
from semkv.kernels import calls
from semkv.kernels.cpp import compiler
from semkv.kernels.state import IN_CPP, REFERENCES

NEEDS_COMPILER = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
FORMS = ["reference", pytest.param("cpp", marks=NEEDS_COMPILER)]
NONE = float("-inf")
ALL = torch.iinfo(torch.int64).max


def chosen_by(form, arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of `choose_each`, of which `choose` has the first, by a form: its name, or what gives them."""
    if callable(form):
        return form(**arguments)
    if form == "reference":
        found, each = REFERENCES["choose_each"](**arguments)
        alone = REFERENCES["choose"](**arguments)
    else:
        asked = {"threshold": None, "cost": None} | arguments
        made = [IN_CPP[name].call(asked) for name in ("choose_each", "choose")]
        assert None not in made
        (found, each), (alone,) = (calls.run(call, asked) for call in made)
    assert torch.equal(alone, found)
    return found, each


def by_loops(score, count, room, threshold=None, cost=None) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, queries, units = score.shape
    chosen, each = torch.zeros(rows, heads, units, dtype=torch.bool), torch.zeros(score.shape, dtype=torch.bool)
    for row in range(rows):
        for head in range(heads):
            best = {}
            wants = {}
            for unit in range(int(count[row])):
                for query in range(queries):
                    x = float(score[row, head, query, unit])
                    if x > NONE and (threshold is None or x > float(threshold[head, query])):
                        best[unit] = max(best.get(unit, NONE), x)
                        wants.setdefault(unit, []).append(query)
            spent = 0
            for unit in sorted(best, key=lambda unit: (-best[unit], unit)):
                spent += 1 if cost is None else int(cost[row, head % cost.shape[1], unit])
                if spent > int(room[row]):
                    break
                chosen[row, head, unit] = True
                each[row, head, wants[unit], unit] = True
    return chosen, each


def check(arguments, form) -> None:
    expected = by_loops(**arguments)
    found = chosen_by(form, arguments)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def made(rows, heads, queries, units, kind="drawn", *, costs=None, most=9, thresholds=False, seed=0):
    """Arguments but for room; behind each row's count stand NaN, what is better than all, and arbitrary costs."""
    generator = torch.Generator().manual_seed(seed + units)
    score = torch.randn(rows, heads, queries, units, generator=generator)
    if kind == "equal":
        score = score.round() * torch.where(
            torch.rand(score.shape, generator=generator) < 0.5, -1.0, score.new_ones(())
        )
    if kind == "near":
        score = 1 + score.abs() * 1e-6
    if kind == "wide":
        score = score * 10 ** torch.randint(-44, 38, score.shape, generator=generator).float()
    score[torch.rand(score.shape, generator=generator) < 0.1] = NONE
    count = torch.randint(0, units + 1, (rows,), generator=generator)
    count[0] = units
    if rows > 1:
        count[1] = 0
    behind = torch.arange(units) >= count[:, None, None, None]
    garbage = torch.where(torch.rand(score.shape, generator=generator) < 0.5, torch.nan, score.new_tensor(1e38))
    arguments = {"score": torch.where(behind, garbage, score), "count": count}
    if thresholds:
        arguments["threshold"] = torch.randn(heads, queries, generator=generator) - 0.5
        arguments["threshold"][0, 0] = NONE
    if costs is not None:
        cost = torch.randint(0, most + 1, (rows, costs, units), generator=generator)
        wild = torch.randint(-(1 << 31), 1 << 31, cost.shape, generator=generator)
        arguments["cost"] = torch.where(behind[:, 0], wild, cost).int()
    return arguments


SIZES = [(1, 1, 1, 1), (3, 2, 3, 63), (4, 3, 2, 111), (2, 2, 1, 500)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["drawn", "equal", "near", "wide"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_chooses_what_loops_choose(sizes, kind, form):
    rows, heads, _, units = sizes
    for costs in (None, 1, heads):
        for thresholds in (False, True):
            arguments = made(*sizes, kind, costs=costs, thresholds=thresholds)
            for room in (-1, 0, 1, units // 3, 3 * units, ALL):
                each = torch.tensor([room, 7, 5, 0])[:rows]
                check(arguments | {"room": each}, form)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_few_numbers_and_costs(data):
    rows, heads, queries, units = (data.draw(st.integers(1, most)) for most in (3, 2, 3, 40))
    numbers = st.sampled_from([NONE, -1.0, -0.0, 0.0, 0.5, 1.0, float("nan")])

    def drawn(elements, *shape, dtype=torch.float32):
        size = torch.Size(shape).numel()
        return torch.tensor(data.draw(st.lists(elements, min_size=size, max_size=size)), dtype=dtype).view(shape)

    arguments = {
        "score": drawn(numbers, rows, heads, queries, units),
        "count": drawn(st.integers(0, units), rows, dtype=torch.int64),
        "room": drawn(st.integers(-1, 2 * units), rows, dtype=torch.int64),
        "threshold": data.draw(st.none() | st.builds(lambda: drawn(numbers, heads, queries))),
        "cost": data.draw(st.none() | st.builds(lambda: drawn(st.integers(0, 3), rows, 1, units, dtype=torch.int32))),
    }
    expected = by_loops(**arguments)
    for form in ("reference", "cpp") if compiler() is not None else ("reference",):
        assert all(map(torch.equal, chosen_by(form, arguments), expected))


@NEEDS_COMPILER
@pytest.mark.parametrize("kind", ["drawn", "equal", "near", "wide"])
def test_many_units_of_which_a_sample_is_taken(kind):
    for sizes in ((2, 2, 2, 20_011), (3, 1, 4, 5_000)):
        for costs in (None, 1):
            arguments = made(*sizes, kind, costs=costs)
            for room in (0, 300, 4_000, ALL):
                asked = arguments | {"room": torch.tensor([room, 100, 17])[: sizes[0]]}
                assert all(map(torch.equal, chosen_by("cpp", asked), chosen_by("reference", asked)))


@NEEDS_COMPILER
def test_a_sample_that_misleads():
    """The units that a sample is of are the best ones, or the worst ones."""
    for sign in (1, -1):
        score = torch.rand(1, 1, 1, 40_000, generator=torch.Generator().manual_seed(1))
        score[..., :: 40_000 // 2048] += sign
        asked = {"score": score, "count": torch.tensor([40_000]), "room": torch.tensor([4_000])}
        assert all(map(torch.equal, chosen_by("cpp", asked), chosen_by("reference", asked)))


@pytest.mark.parametrize("form", FORMS)
def test_no_units(form):
    empty = {"score": torch.zeros(2, 2, 1, 0), "count": torch.zeros(2, dtype=torch.int64)}
    found, each = chosen_by(form, empty | {"room": torch.tensor([3, 0])})
    assert found.shape == (2, 2, 0)
    assert each.shape == (2, 2, 1, 0)


@pytest.mark.parametrize("form", FORMS)
def test_scores_may_be_a_part_of_more(form):
    arguments = made(2, 2, 3, 70, costs=2, thresholds=True)
    room = torch.tensor([40, 3])
    wider = torch.full((2, 4, 3, 90), torch.nan)
    wider[:, 1:3, :, 5:75] = arguments["score"]
    costs = torch.full((2, 2, 75), -1, dtype=torch.int32)
    costs[..., 3:73] = arguments["cost"]
    check(arguments | {"score": wider[:, 1:3, :, 5:75], "cost": costs[..., 3:73], "room": room}, form)
    one = arguments["score"][:1].expand(2, -1, -1, -1)
    check(arguments | {"score": one, "count": torch.tensor([70, 11]), "cost": None, "room": room}, form)


@NEEDS_COMPILER
def test_what_stands_in_results_and_scratch_before_does_not_matter(monkeypatch):
    def filled(*shape, dtype, device):
        x = torch.zeros(*shape, dtype=dtype, device=device)
        x.view(torch.uint8).fill_(255)
        return x

    monkeypatch.setattr(calls, "torch", SimpleNamespace(**(vars(torch) | {"empty": filled})))
    check(made(3, 2, 3, 300, costs=1) | {"room": torch.tensor([80, 3, 9])}, "cpp")


@NEEDS_COMPILER
def test_threads_change_nothing():
    asked = made(2, 3, 4, 9_000, "equal", costs=3) | {"room": torch.tensor([5_000, 10])}
    before, results = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(chosen_by("cpp", asked))
    torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", ["choose", "choose_each"])
def test_the_operators_are_as_their_schemas_say(name):
    asked = made(2, 2, 3, 50, costs=1, thresholds=True) | {"room": torch.tensor([60, 5])}
    asked["score"] = asked["score"].nan_to_num(neginf=NONE)
    operator = getattr(state_ops, name)
    torch.library.opcheck(operator, (), asked, test_utils=("test_schema", "test_faketensor"))
    found = operator(**asked)
    expected = by_loops(**asked)
    assert torch.equal(found if name == "choose" else found[0], expected[0])


def test_the_reference_is_traced_without_numbers():
    asked = made(2, 2, 3, 50, costs=1, thresholds=True) | {"room": torch.tensor([60, 5])}
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in asked.items()}
        assert REFERENCES["choose"](**fake).shape == (2, 2, 50)
    graph = make_fx(lambda arguments: REFERENCES["choose_each"](**arguments), tracing_mode="fake")(asked)
    for seed in (0, 1):
        asked = made(2, 2, 3, 50, costs=1, thresholds=True, seed=seed) | {"room": torch.tensor([40, 9])}
        assert all(map(torch.equal, graph(asked), by_loops(**asked)))


def test_what_cpp_cannot_is_done_by_the_reference():
    asked = made(2, 2, 3, 50) | {"room": torch.tensor([40, 9])}
    spread = asked | {"score": asked["score"].repeat_interleave(2, 3)[..., ::2]}
    assert IN_CPP["choose"].call({"threshold": None, "cost": None} | spread) is None
    assert torch.equal(state_ops.choose(**spread), by_loops(**asked)[0])
