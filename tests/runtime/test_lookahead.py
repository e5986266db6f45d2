"""What is fetched ahead changes when tokens come, never which: steps with it give the bits of steps without it."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from semkv.config import CompileConfig
from semkv.runtime.host_pool import HostTokens, room_kinds
from semkv.runtime.prediction import Certain, Likely, Whereabouts
from semkv.runtime.prefetch import Prefetcher
from semkv.runtime.supply import Supply

HEADS, TOKENS, DIMS = 2, 12, (3, 2)
KINDS = room_kinds(*DIMS, torch.float32, codes=False)
CPU = torch.device("cpu")
PROMPT, STEPS = 160, 8
METHODS = {
    "quest": ("quest", 0.3, {"page": 4}),
    "sekv": ("sekv", 0.4, {}),
    "sekv, factored": ("sekv", 0.4, {"forms": "factored"}),
    "sekv, thresholds": ("sekv", 0.4, {"fill": False}),
    "clusterkv": ("clusterkv", 0.7, {"tokens_per_cluster": 4, "window": 16, "fold_chunk": 8}),
    "omnikv": ("omnikv", 0.4, {"strict": True}),
    "compresskv": ("compresskv", 0.5, {"recoverable": True, "span": 4}),
}


# -- supply ------------------------------------------------------------------------------------------------------------


def stored(form: str) -> HostTokens:
    generator = torch.Generator().manual_seed(0)
    tokens = HostTokens(HEADS, *DIMS, torch.float32, form)
    tokens.append(*(torch.randn(HEADS, TOKENS, dim, generator=generator) for dim in DIMS))
    return tokens


def rows(pairs: set[tuple[int, int]] | list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    both = torch.tensor(sorted(pairs) if isinstance(pairs, set) else pairs, dtype=torch.int64).view(-1, 2)
    return both[:, 0], both[:, 1]


def check(supply: Supply, host: HostTokens, heads: Tensor, places: Tensor) -> None:
    """What was asked for stands in the rows it was asked into, and nothing in the others."""
    at = torch.randperm(len(places) + 3, generator=torch.Generator().manual_seed(len(places)))[: len(places)]
    rooms = [torch.full((len(places) + 3, dim), float("nan")) for dim in DIMS]
    supply.fill(rooms, at, places, heads)
    for room, x in zip(rooms, host.gather(places, heads)):
        assert torch.equal(room[at], x)
        assert int(room.isnan().all(1).sum()) == 3


PAIRS = st.tuples(st.integers(0, HEADS - 1), st.integers(0, TOKENS - 1))


@settings(max_examples=80, deadline=None)
@given(st.sets(PAIRS, max_size=20), st.lists(PAIRS, max_size=20, unique=True), st.sampled_from(("raw", "int8")))
def test_what_was_fetched_and_what_was_not_go_where_they_belong(fetched, asked, form):
    host, prefetcher = stored(form), Prefetcher(20, KINDS, CPU)
    fetch = prefetcher.submit(host, lambda: rows(fetched))
    supply = Supply(host, prefetcher, fetch)
    heads, places = rows(asked)
    check(supply, host, heads, places)
    assert fetch.arrived.wait(20)
    supply.release()
    hits = len(set(asked) & fetched)
    assert (supply.told.fetched, supply.told.hits, supply.told.missed) == (len(fetched), hits, len(asked) - hits)
    assert (supply.told.stalled_seconds > 0) == bool(asked)
    prefetcher.close()


@pytest.mark.filterwarnings("ignore:tokens could not be fetched ahead")
def test_a_fetch_that_fails_leaves_everything_to_the_step():
    host, prefetcher = stored("raw"), Prefetcher(20, KINDS, CPU, buffers=1)

    def fails():
        raise OSError("unplugged")

    supply = Supply(host, prefetcher, prefetcher.submit(host, fails))
    heads, places = rows([(1, 3), (0, 2)])
    check(supply, host, heads, places)
    supply.release()
    assert (supply.told.fetched, supply.told.hits, supply.told.missed) == (0, 0, 2)
    assert supply.told.fetch is None
    assert prefetcher.faults == 1
    assert prefetcher.submit(host, lambda: rows([(0, 0)])) is not None  # the buffer is back


# -- prediction --------------------------------------------------------------------------------------------------------


def whereabouts(heads_apart: bool) -> Whereabouts:
    """Five units of 1 to 3 tokens in six segments: one unit is of two segments, one waits as factors, one segment is nobody's."""
    unit = torch.tensor([[0, 1, 2, 1, 3, -1, 4]])
    unit = torch.cat([unit, torch.tensor([[4, 3, 2, 3, 1, -1, 0]])]) if heads_apart else unit
    length = torch.tensor([2, 1, 3, 1, 2, 5, 1])
    kinds = torch.tensor([True, True, True, True, False, True, True])
    start = torch.tensor([9, 30, 0, 4, 0, 11, 20])
    sizes = torch.zeros(len(unit), 5, dtype=torch.int64)
    sizes.scatter_add_(1, unit.clamp(min=0), (length * (unit >= 0)).expand(len(unit), -1))
    return Whereabouts(unit, kinds, length, start, sizes.to(torch.int32))


def naive_tokens(where: Whereabouts, units: Tensor, held: Tensor | None = None) -> list[tuple[int, int]]:
    found = []
    for head in range(HEADS):
        for segment, unit in enumerate(where.segment_unit.expand(HEADS, -1)[head].tolist()):
            if unit < 0 or not units[head, unit] or not where.waits_as_tokens[segment]:
                continue
            if held is None or segment >= held.shape[1] or not held[head, segment]:
                start = int(where.start[segment])
                found += [(head, place) for place in range(start, start + int(where.length[segment]))]
    return sorted(found)


def pairs(wanted: tuple[Tensor, Tensor]) -> list[tuple[int, int]]:
    return list(zip(wanted[0].tolist(), wanted[1].tolist()))


@pytest.mark.parametrize("heads_apart", [False, True])
def test_units_are_found_where_they_wait(heads_apart):
    where = whereabouts(heads_apart)
    units = torch.tensor([[True, True, False, True, False], [False, True, True, False, True]])
    held = torch.tensor([[True, False], [False, True]])
    assert pairs(where.tokens(units, 100)) == naive_tokens(where, units)
    assert pairs(Certain(where, units, held, 100)()) == naive_tokens(where, units, held)
    few = pairs(Certain(where, units, held, 3)())
    assert len(few) == 3
    assert set(few) < set(naive_tokens(where, units, held))


@pytest.mark.parametrize("most", [2, 6, 8, 100])
def test_the_units_below_the_cut_are_likely(most):
    where = whereabouts(True)
    score = torch.tensor([[5.0, 1.0, 3.0, 2.0, 0.0], [0.0, 4.0, 1.0, 1.0, 0.0], [3.0, 0, 2, 1, 7], [3, 1, 9, 0, 0]])
    score[0, 4] = score[1, 4] = float("-inf")  # never to be unfolded
    chosen = torch.tensor([[True, False, False, False, False], [False, False, False, False, True]])
    expected = torch.zeros_like(chosen)
    for head in range(HEADS):
        best, room = score[2 * head : 2 * head + 2].amax(0), most // HEADS
        for unit in best.argsort(descending=True).tolist():
            if not chosen[head, unit] and best[unit] > float("-inf"):
                room -= int(where.sizes[head, unit])
                if room < 0:
                    break
                expected[head, unit] = True
    assert pairs(Likely(where, score, chosen, most)()) == naive_tokens(where, expected)


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def both(wide_program, compile_as):
    """`both(method, budget, options) -> (without, with)` prefetching."""

    def make(method, budget, options, **config):
        return tuple(
            compile_as(wide_program, method, budget, options=options, prefetch=on, **config) for on in (False, True)
        )

    return make


def decode(compiled, state, steps: int) -> list[Tensor]:
    """Logits of each greedy step."""
    out = []
    for _ in range(steps):
        compiled.extend(state, state.logits.argmax(-1, keepdim=True))
        out.append(state.logits.clone())
    return out


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right))


@pytest.mark.parametrize("name", list(METHODS))
def test_steps_give_the_same_bits(both, prompt, name):
    without, with_ = both(*METHODS[name], extend_chunk=4)
    states = [compiled.prefill(prompt(PROMPT, rows=2)) for compiled in (without, with_)]
    assert equal(decode(without, states[0], STEPS), decode(with_, states[1], STEPS))
    question = prompt(7, rows=2, seed=3)  # several tokens at once choose for themselves
    assert torch.equal(without.extend(states[0], question), with_.extend(states[1], question))
    off, on = (state.stats for state in states)
    assert off.overlap == on.overlap
    assert off.hit_rate == off.ahead_bytes_per_step == 0
    assert states[0].nbytes["prefetch"] == 0
    traffic = [row.traffic for row in states[1].rows]
    assert all(
        t.hit_tokens + t.missed_tokens <= u.missed_tokens for t, u in zip(traffic, [r.traffic for r in states[0].rows])
    )
    if name != "sekv, factored":
        assert on.hit_rate > 0
        assert on.ahead_bytes_per_step > 0
    assert states[0].nbytes["device"] == states[1].nbytes["device"]
    assert states[0].nbytes["peak"] == states[1].nbytes["peak"]


def test_a_choice_that_is_known_is_fetched_whole(both, prompt):
    """Layers that follow a filter lack nothing that was not on its way, where it fits the buffer and units stay as they are."""
    _, with_ = both("omnikv", 0.4, {"strict": True, "filter_layers": (0,)})
    state = with_.prefill(prompt(PROMPT))
    decode(with_, state, 2)
    row, last = state.rows[0], with_.program.sites[-1].store
    whole = 0
    for _ in range(STEPS):
        units = row.stores[last][0].spans.lengths
        decode(with_, state, 1)
        memory = row.stores[last][0]
        took = memory.supplied
        if memory.spans.lengths is units and 0 < took.hits + took.missed <= memory.ahead:
            assert took.missed == 0
            assert took.fetched == took.hits
            whole += 1
        assert memory.likely is None, "scores of all units, kept for nothing"
    assert whole > 0


def test_buffers_are_a_constant_beside_the_budget(both, prompt):
    _, with_ = both("quest", 0.3, {"page": 4})
    state = with_.prefill(prompt(PROMPT))
    assert state.nbytes["prefetch"] == 0  # made by the first step
    decode(with_, state, 1)
    lookahead = state.rows[0].lookahead
    size = lookahead.nbytes
    assert size == state.nbytes["prefetch"] == 2 * lookahead.prefetcher.capacity * 2 * 64 * 4
    decode(with_, state, 12)
    assert state.nbytes["prefetch"] == size
    assert state.stats.peak_share <= 1


def test_forks_files_and_selected_rows_go_on_alike(both, prompt, tmp_path):
    without, with_ = both("quest", 0.3, {"page": 4})
    plain, state = (compiled.prefill(prompt(PROMPT, rows=2)) for compiled in (without, with_))
    assert equal(decode(without, plain, 5), decode(with_, state, 5))
    fork, chosen = state.fork(), state.select([1, 1, 0])
    state.save(tmp_path / "state")
    loaded = with_.load_state(tmp_path / "state")
    assert without.load_state(tmp_path / "state").lengths == loaded.lengths
    expected = decode(without, plain, 8)
    for other in (state, fork, loaded):
        assert equal(decode(with_, other, 8), expected)
    threes = decode(with_, chosen, 8)
    assert equal([x[[2, 0]] for x in threes], expected)
    assert fork.rows[0].lookahead is not state.rows[0].lookahead


@pytest.mark.filterwarnings("ignore:tokens could not be fetched ahead")
def test_faults_of_the_thread_change_nothing(both, prompt, monkeypatch):
    without, with_ = both("quest", 0.3, {"page": 4})
    expected = decode(without, without.prefill(prompt(PROMPT)), 12)
    fill, count = HostTokens.fill, 0

    def unreliable(self, *into, threads=None):
        nonlocal count
        if threading.current_thread().name == "semkv-prefetch":
            count += 1
            if count % 3 == 0:
                raise OSError("unplugged")
        fill(self, *into, threads=threads)

    monkeypatch.setattr(HostTokens, "fill", unreliable)
    state = with_.prefill(prompt(PROMPT))
    got = decode(with_, state, 6)
    prefetcher = state.rows[0].lookahead.prefetcher
    assert prefetcher.faults > 0
    prefetcher.close()
    assert equal(got + decode(with_, state, 6), expected)


def test_a_caller_in_inference_mode(both, prompt):
    without, with_ = both("quest", 0.3, {"page": 4})
    with torch.inference_mode():
        state = with_.prefill(prompt(PROMPT))
        got = decode(with_, state, 6)
    assert state.rows[0].lookahead.prefetcher.faults == 0
    assert equal(got, decode(without, without.prefill(prompt(PROMPT)), 6))


def test_where_it_is_on():
    assert not CompileConfig().prefetches
    assert CompileConfig(host="disk").prefetches
    assert CompileConfig(prefetch=True).prefetches
    assert not CompileConfig(host="disk", prefetch=False).prefetches
    assert not CompileConfig(host="disk").guesses
    assert CompileConfig(prefetch=True).guesses


@pytest.mark.parametrize(("name", "ahead"), [("quest", {"prefetch": True}), ("quest", {}), ("omnikv", {})])
def test_the_disk_tier_fetches_ahead_what_is_known_or_asked_for(
    wide_program, compile_as, prompt, tmp_path, name, ahead
):
    method, budget, options = METHODS[name]
    made = [
        compile_as(wide_program, method, budget, options=options, **config)
        for config in ({}, {"host": "disk", "disk_folder": str(tmp_path)} | ahead)
    ]
    states = [compiled.prefill(prompt(PROMPT)) for compiled in made]
    assert equal(*(decode(compiled, state, 8) for compiled, state in zip(made, states)))
    assert states[0].rows[0].lookahead is None
    assert states[1].nbytes["disk"] > 0
    if (name, ahead) == ("quest", {}):
        assert states[1].rows[0].lookahead is None
    else:
        assert states[1].stats.hit_rate > 0
