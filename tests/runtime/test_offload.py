"""Progressive offload: layers go to the host at the lengths of Alg. 1, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

import semkv
from semkv.compiler.offload import offload_demand
from semkv.errors import BudgetError, ConfigError
from semkv.runtime.host.pool import AHEAD

BUDGET = 96
FIRST = 150
"""Tokens up to which everything stays on the device."""

METHODS = [
    ("quest", {}),
    ("shadowkv", {}),
    ("infllm", {}),
    ("clusterkv", {}),
    ("sekv", {"router": "untrained", "forms": "raw"}),
    ("sekv", {"router": "untrained", "forms": "int8"}),
    ("sekv", {"router": "untrained", "forms": "factored", "max_rank": 4}),
]
IDS = [
    "-".join([name, *options.values()]) if not options.get("max_rank") else f"{name}-factored"
    for name, options in METHODS
]


def demand_of(compiled):
    return offload_demand(compiled.program, compiled.placement.plan, None, compiled.placement.budget, compiled.settings)


@pytest.fixture
def both(wide_program, compile_as):
    """`both(method, budget, first=150, **config)`: the method with all that is folded on the host, and progressively, so that
    the device holds everything of `first` tokens."""

    def make(method, options=None, budget=BUDGET, first=FIRST, **config):
        config = {"kv_dtype": "float16", "extend_chunk": 32} | config
        plain = compile_as(
            wide_program,
            method,
            budget,
            options=options,
            **{name: value for name, value in config.items() if name not in ("rows", "host_memory")},
        )
        rows = config.pop("rows", 1)
        there = {"offload": "progressive", "rows": rows}
        probe = compile_as(wide_program, method, budget, options=options, **config, **there, device_memory="1TB")
        device = int(demand_of(probe).device_bytes(first, 0))
        return plain, compile_as(wide_program, method, budget, options=options, **config, **there, device_memory=device)

    return make


def on_device(state, row=0):
    """Whether each folding store's tokens wait on the device, in order."""
    return [memory.on_device for memory in state.rows[row].budgeted()]


def seeded(run, *arguments):
    """What a call gives when factors start from the same random projection."""
    torch.manual_seed(0)
    return run(*arguments)


@pytest.mark.parametrize(("method", "options"), METHODS, ids=IDS)
def test_nothing_changes_across_a_threshold(both, prompt, method, options):
    plain, progressive = both(method, options)
    first, second, _ = progressive.placement.thresholds
    assert first == FIRST
    assert 2 * FIRST - 20 <= second <= 2 * FIRST
    assert [site.host_from for site in progressive.program.sites] == [second + 1, None, first + 1]
    one, other = (seeded(compiled.prefill, prompt(90)) for compiled in (plain, progressive))
    assert on_device(other) == [True, True]
    assert torch.equal(one.logits, other.logits)
    seen = {tuple(on_device(other))}
    for size in (first - 91, 1, 1, second - first - 3, 2, 1, 5):
        step = prompt(size, seed=size)
        assert torch.equal(seeded(plain.extend, one, step), seeded(progressive.extend, other, step))
        tokens = other.lengths[0]
        assert on_device(other) == [tokens <= second, tokens <= first]
        seen.add(tuple(on_device(other)))
    assert seen == {(True, True), (True, False), (False, False)}
    assert other.nbytes["host"] == one.nbytes["host"]
    assert other.nbytes["resident"] == 0


@pytest.mark.parametrize("budget", [BUDGET, 0.7])
@pytest.mark.parametrize(("method", "options"), [METHODS[0], METHODS[4], METHODS[5]], ids=["quest", "raw", "int8"])
def test_bytes_follow_the_model(both, prompt, resident, method, options, budget):
    _, progressive = both(method, options, budget=budget)
    demand, limits = demand_of(progressive), progressive.placement.thresholds
    state = progressive.prefill(prompt(110))
    row = state.rows[0]
    for size in (39, 1, 1, 60, 32, 32, 20, 1, 15, 30):
        if state.lengths[0] + size > limits[-1]:
            break
        progressive.extend(state, prompt(size, seed=size))
        tokens = state.lengths[0]
        offloaded = next(i for i, limit in enumerate(limits) if tokens <= limit)
        memories = list(row.budgeted())
        waiting = 0
        for place, memory in enumerate(memories):
            spans = memory.spans
            folded = len(spans.waiting_places()[0])
            assert spans.waiting_nbytes == folded * demand.waiting[place]
            assert memory.on_device == (place < len(memories) - offloaded)
            waiting += spans.waiting_nbytes if memory.on_device else 0
            tables = sum(x.nbytes for name, x in vars(spans).items() if name.startswith("segment_"))
            assert memory.host_nbytes >= tables + (0 if memory.on_device else spans.waiting_nbytes)
        assert state.nbytes["resident"] == waiting
        ahead = sum(m.spans.reserved_nbytes for m in memories if m.on_device)
        assert ahead <= AHEAD * sum(demand.waiting)
        held = resident(row) + waiting
        assert held + ahead <= demand.row_bytes(tokens, offloaded) + AHEAD * sum(demand.waiting)
        # No more is predicted than the tokens that are not folded and a budget that is not quite filled make up for.
        assert demand.row_bytes(tokens, offloaded) - held <= sum(demand.exact) * float(demand.selected(tokens)) * 2
        assert row.traffic.peak_share <= 1
    assert offloaded > 0


def test_a_long_prompt_sends_several_layers_at_once(both, prompt):
    plain, progressive = both("quest")
    for length, expected in ((150, [True, True]), (151, [True, False]), (320, [False, False])):
        state = progressive.prefill(prompt(length))
        assert on_device(state) == expected
        assert state.rows[0].traffic.offloaded_bytes == 0
        assert torch.equal(state.logits, plain.prefill(prompt(length)).logits)
    state = progressive.prefill(prompt(150))
    before = state.nbytes["resident"]
    progressive.extend(state, prompt(1))
    assert 0 < state.rows[0].traffic.offloaded_bytes < before
    assert state.nbytes["resident"] == pytest.approx(before - state.rows[0].traffic.offloaded_bytes, abs=16 * 300)


def test_nothing_crosses_the_link_for_a_layer_on_the_device(both, prompt):
    plain, progressive = both("quest", first=400)
    one, other = plain.prefill(prompt(200)), progressive.prefill(prompt(200))
    plain.extend(one, prompt(8))
    progressive.extend(other, prompt(8))
    assert one.stats.moved_bytes_per_step > 0
    assert other.stats.moved_bytes_per_step == 0


def test_generation_over_both_thresholds(both, prompt):
    plain, progressive = both("quest", first=130)
    wanted = plain.generate(prompt(120), max_new_tokens=20, do_sample=False)
    assert torch.equal(progressive.generate(prompt(120), max_new_tokens=20, do_sample=False), wanted)


def test_rows_leave_by_their_own_length(both, prompt):
    _, progressive = both("quest", rows=2)
    ids = prompt(150, rows=2)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    together = progressive.prefill(ids, mask)
    progressive.extend(together, prompt(1, rows=2))
    assert on_device(together, 0) == [True, True]
    assert on_device(together, 1) == [True, False]
    alone = progressive.prefill(ids[1:])
    progressive.extend(alone, prompt(1, rows=2)[1:])
    torch.testing.assert_close(alone.logits[0], together.logits[1])
    with pytest.raises(
        BudgetError, match=r"3 rows: the lengths .* computed for 2; compile with CompileConfig\(rows=3\)"
    ):
        progressive.prefill(prompt(20, rows=3))


def test_a_fork_leaves_on_its_own(both, prompt):
    _, progressive = both("quest")
    state = progressive.prefill(prompt(149))
    fork = state.fork()
    progressive.extend(fork, prompt(4))
    assert on_device(fork) == [True, False]
    assert on_device(state) == [True, True]
    progressive.extend(state, prompt(4))
    assert torch.equal(state.logits, fork.logits)


def test_states_are_saved_from_both_tiers(both, prompt, tmp_path):
    plain, progressive = both("quest")
    state = progressive.prefill(prompt(151))
    state.save(tmp_path / "state")
    loaded = progressive.load_state(tmp_path / "state")
    assert on_device(loaded) == [True, False]
    assert loaded.nbytes["resident"] == state.nbytes["resident"]
    elsewhere = plain.load_state(tmp_path / "state")  # where tokens wait is no part of a state
    assert on_device(elsewhere) == [False, False]
    step = prompt(3, seed=5)
    expected = progressive.extend(state, step)
    assert torch.equal(progressive.extend(loaded, step), expected)
    assert torch.equal(plain.extend(elsewhere, step), expected)


def test_a_file_takes_what_leaves_the_device(both, prompt):
    _, progressive = both("quest", host="disk")
    state = progressive.prefill(prompt(150))
    last = list(state.rows[0].budgeted())[-1].spans
    assert last.disk_nbytes == 0
    progressive.extend(state, prompt(1))
    assert last.disk_nbytes == last.waiting_nbytes > 0
    assert state.nbytes["disk"] > 0


def test_what_does_not_fit_is_refused(both, wide_program, compile_as, prompt):
    _, progressive = both("quest", budget=0.5)
    last = progressive.placement.thresholds[-1]
    message = rf"a sequence of {last + 1} tokens does not fit: with every layer's KV on the host the device holds {last} tokens"
    with pytest.raises(BudgetError, match=message):
        progressive.prefill(prompt(last + 1))
    state = progressive.prefill(prompt(last))
    with pytest.raises(BudgetError, match=message):
        progressive.extend(state, prompt(1))
    there = {"offload": "progressive", "device_memory": 1000}
    with pytest.raises(
        BudgetError, match=r"device memory of 1,000 bytes: the weights .* use a device with more memory"
    ):
        compile_as(wide_program, "quest", BUDGET, **there)
    with pytest.raises(ConfigError, match=r"the method keeps or drops tokens for good, use offload='budget'"):
        compile_as(wide_program, "snapkv", BUDGET, **there)


def test_a_full_host_is_the_end(both, wide_program, compile_as, prompt):
    _, progressive = both("quest")
    waiting = demand_of(progressive).waiting
    small = compile_as(
        wide_program,
        "quest",
        BUDGET,
        kv_dtype="float16",
        offload="progressive",
        device_memory=progressive.settings.device_memory,
        host_memory=200 * waiting[-1],
    )
    assert small.placement.thresholds == (150, 200, 200)
    with pytest.raises(BudgetError, match=r"a sequence of 201 tokens does not fit"):
        small.prefill(prompt(201))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"offload": "progressive"}, r"offload='progressive' needs device_memory, such as '24GB'"),
        ({"device_memory": "8GB"}, r"device_memory is for offload='progressive'"),
        ({"rows": 2}, r"rows is for offload='progressive'"),
        (
            {"offload": "progressive", "device_memory": "much"},
            r"setting device_memory = 'much': 'much' is no size: expected",
        ),
    ],
)
def test_settings_that_make_no_sense(values, message):
    with pytest.raises(ConfigError, match=message):
        semkv.CompileConfig(**values)


def test_sizes_are_read():
    sizes = {"24GB": 24 * 10**9, "1.5 GiB": 3 * 2**29, "4096": 4096, "10mb": 10**7}
    for text, count in sizes.items():
        settings = semkv.CompileConfig(offload="progressive", device_memory=text)
        assert settings.device_memory == count
        assert semkv.CompileConfig.model_validate_json(settings.model_dump_json()) == settings


def test_artifacts_keep_the_thresholds(both, prompt, tmp_path):
    _, progressive = both("quest")
    progressive.save(tmp_path / "artifact")
    loaded = semkv.load(tmp_path / "artifact")
    assert loaded.placement.thresholds == progressive.placement.thresholds
    assert [site.host_from for site in loaded.program.sites] == [site.host_from for site in progressive.program.sites]
    assert on_device(loaded.prefill(prompt(151))) == [True, False]
    assert (
        "on the host from 151 tokens on" in semkv.explain(loaded).replace("\n", " ") or loaded.program.sites[2].reason
    )
