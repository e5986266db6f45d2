"""Methods that bring tokens back: budget held, states saved, and full attention where all comes back."""

from __future__ import annotations

import pytest
import torch

from semkv import bundled
from semkv.api import compile as compile_model
from semkv.config import CompileConfig
from semkv.errors import BudgetError, ConfigError
from semkv.methods import find_method

RETRIEVING = ("quest", "shadowkv", "infllm", "clusterkv", "sketch")
SMALL = {"infllm": {"block": 8}, "clusterkv": {"tokens_per_cluster": 12}}


@pytest.fixture(scope="module")
def whole():
    model, _ = bundled.load()
    return compile_model(model, bundled.profile(), method="full", config=CompileConfig(kv_dtype="float16"))


def prompt(tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 600, (1, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", RETRIEVING)
def test_the_budget_holds_in_prefill_and_generation(whole, name):
    compiled = whole.with_method(name, budget=0.25, **SMALL.get(name, {}))
    state = compiled.prefill(prompt(400, 1))
    for seed in range(6):
        compiled.extend(state, prompt(30, seed))
        row = state.rows[0]
        held = sum(sum(x.nbytes for x in memory.spans.device_tensors()) for memory in row.budgeted() if memory.spans)
        held += sum(memory.kept.nbytes + memory.recent.nbytes for memory in row.budgeted())
        assert held == row.device_nbytes()
        assert held <= row.cap_bytes(row.tokens)
    assert state.stats.peak_share <= 1
    assert state.stats.moved_bytes_per_step > 0
    assert state.nbytes["host"] <= 0.6 * state.full_bytes


@pytest.mark.parametrize("name", RETRIEVING)
def test_far_beyond_a_budget_in_tokens(whole, name):
    """Units merge, or the oldest leave the device; the host keeps every token."""
    compiled = whole.with_method(name, budget=100, **SMALL.get(name, {}))
    state = compiled.prefill(prompt(200, 1))
    for seed in range(5):
        compiled.extend(state, prompt(100, seed))
    assert state.stats.peak_share <= 1
    for memory in state.rows[0].budgeted():
        if memory.spans is not None:
            assert memory.kept.length + memory.recent.length + memory.spans.host_tokens.length == 700


@pytest.mark.parametrize("name", RETRIEVING)
def test_saved_states_go_on(whole, name, tmp_path):
    compiled = whole.with_method(name, budget=0.6, **SMALL.get(name, {}))
    state = compiled.prefill(prompt(300, 300))
    compiled.extend(state, prompt(9, 3))
    state.save(tmp_path / "state")
    again = compiled.load_state(tmp_path / "state")
    more = prompt(20, 4)
    assert torch.equal(compiled.extend(state, more, all_logits=True), compiled.extend(again, more, all_logits=True))


@pytest.mark.parametrize("name", RETRIEVING)
def test_with_room_for_everything_it_is_full_attention(whole, name):
    """What stays folded is nothing: only the 8 bits of folded tokens are left of the approximation."""
    options = SMALL.get(name, {}) | (
        {"all_heads": True, "fixed_share": 0.3} if name == "sketch" else {"fixed_share": 0.3}
    )
    compiled = whole.with_method(
        name, budget=2000, config=whole.settings.model_copy(update={"residency": "elastic"}), **options
    )
    ids, question = prompt(900, 5), prompt(4, 6)
    state, reference = compiled.prefill(ids), whole.prefill(ids)
    assert any(memory.spans.count > 3 for memory in state.rows[0].budgeted())
    got, expected = compiled.extend(state, question), whole.extend(reference, question)
    assert float((got.softmax(-1) - expected.softmax(-1)).abs().max()) < 0.03


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("quest", {"bits": 5}, "option 'bits' of method 'quest' is 5; expected 4, 8 or 16"),
        ("shadowkv", {"chunk": 0}, "option 'chunk' of method 'shadowkv' is 0; expected at least 1"),
        ("infllm", {"representatives": 0}, "option 'representatives' of method 'infllm' is 0"),
        ("clusterkv", {"rounds": 0}, "option 'rounds' of method 'clusterkv' is 0"),
        ("sketch", {"idle_share": 0.0}, "option 'idle_share' of method 'sketch' is 0.0; expected a share"),
    ],
)
def test_options_are_checked(name, options, message):
    with pytest.raises(ConfigError, match=message):
        find_method(name, options)


def test_a_sketch_needs_its_profile(whole):
    model, _ = bundled.load()
    with pytest.raises(ConfigError, match="needs a profile with a token sketch: make one with `semkv-profile"):
        compile_model(model, method="sketch", budget=0.1)


@pytest.mark.parametrize("name", RETRIEVING)
def test_a_budget_below_the_smallest_names_it(whole, name):
    with pytest.raises(BudgetError, match=f"'{name}' needs at least {find_method(name).minimum_tokens}"):
        whole.with_method(name, budget=0.01).prefill(prompt(300, 1))
