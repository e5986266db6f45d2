"""`CompiledModel`: Hugging Face's generate on a compressed memory, several turns, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, StoppingCriteria

import semkv
from semkv.errors import BudgetError, ConfigError, InputError, ProfileError

VOCAB = 41
UNTRAINED = {"router": "coarse"}


def sensitive(model: torch.nn.Module) -> torch.nn.Module:
    """Random weights large enough that tokens depend on what was read long before."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(4.0)
    return model


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=300,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return sensitive(LlamaForCausalLM(config).double()).eval()


@pytest.fixture(scope="module")
def before(model) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


@pytest.fixture(scope="module")
def full(model, before):
    return semkv.compile(model, config=semkv.CompileConfig(floor=0))


@pytest.fixture(scope="module")
def small(full):
    return full.with_method("sekv", 0.5, **UNTRAINED)


def ids(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def test_the_users_model_is_shared_and_unchanged(model, before, full):
    full.generate(ids(20), max_new_tokens=2)
    assert {name: torch.equal(x, before[name]) for name, x in model.state_dict().items()} == dict.fromkeys(before, True)
    theirs = {x.data_ptr() for x in model.parameters()}
    ours = {
        x.data_ptr()
        for module in (full.program.body, full.program.head, full.program.decode)
        for x in module.parameters()
    }
    assert ours == theirs
    assert full.config is not model.config
    assert not model.training


GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "do_sample": False},
    "several beams": {"num_beams": 4, "num_return_sequences": 2, "do_sample": False, "length_penalty": 0.5},
    "processors": {"do_sample": False, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "configured": {"generation_config": GenerationConfig(max_new_tokens=7, do_sample=False, pad_token_id=0)},
}


@pytest.mark.parametrize("name", list(GENERATION))
def test_full_generates_what_the_model_generates(model, full, name):
    options = {"max_new_tokens": 7} if name != "configured" else {}
    options |= {"attention_mask": torch.ones(2, 30, dtype=torch.int64), **GENERATION[name]}
    torch.manual_seed(11)
    expected = model.generate(ids(30, 2), **copy.deepcopy(options))
    torch.manual_seed(11)
    got = full.generate(ids(30, 2), **copy.deepcopy(options))
    assert got.tolist() == expected.tolist()
    assert len({tuple(row) for row in got.tolist()}) == len(got)


def test_a_deep_copy_generates_alone(small):
    """What holds a compiled model can be copied, as any module can."""
    copied = copy.deepcopy(small)
    state = copied.prefill(ids(90, 1))
    assert (
        copied.generate(ids(90, 1), max_new_tokens=5).tolist() == small.generate(ids(90, 1), max_new_tokens=5).tolist()
    )
    assert copied.extend(state, ids(1, 1)).isfinite().all()


def test_left_padded_rows_generate_what_they_would_alone(model, full, small):
    mask = torch.ones(3, 120, dtype=torch.int64)
    prompt = ids(120, 3)
    for row, padding in enumerate((0, 31, 9)):
        mask[row, :padding] = 0
        prompt[row, :padding] = 0
    for compiled, other in ((full, model), (small, small)):
        got = compiled.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False)
        for row, padding in enumerate((0, 31, 9)):
            own = prompt[row : row + 1, padding:]
            alone = other.generate(own, attention_mask=torch.ones_like(own), max_new_tokens=8, do_sample=False)
            assert got[row, 120:].tolist() == alone[0, 120 - padding :].tolist()


class Collect:
    """What a streamer is asked for."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


class StopAt(StoppingCriteria):
    """Stops a row at any of these tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], self.tokens)


def test_streamers_and_stopping_criteria(small):
    streamer = Collect()
    out = small.generate(ids(100), max_new_tokens=9, streamer=streamer, do_sample=False)
    assert streamer.tokens == out[0].tolist()
    assert streamer.ended
    third = int(out[0, 102])
    stopped = small.generate(ids(100), max_new_tokens=9, do_sample=False, stopping_criteria=[StopAt(third)])
    expected = out[0, : 100 + out[0, 100:].tolist().index(third) + 1]
    assert stopped[0].tolist() == expected.tolist()


def test_several_turns_equal_one_prompt(model, full):
    state = full.prefill(ids(25))
    history = ids(25)
    for turn in range(3):
        new = ids(4, seed=turn + 1)
        history = torch.cat((history, new), 1)
        got = full.generate(new, state=state, max_new_tokens=5, do_sample=False)
        expected = model.generate(history, attention_mask=torch.ones_like(history), max_new_tokens=5, do_sample=False)
        assert got[0, 4:].tolist() == expected[0, -5:].tolist()
        history = expected
    assert state.lengths == [25 + 3 * 4 + 3 * 5 - 1]
    assert state.pending.tolist() == [[int(history[0, -1])]]


def test_a_row_that_ends_early_reads_none_of_its_neighbours_padding(full, small):
    """Two turns of two conversations together are the turns of each alone, though one ends first."""
    for compiled in (full, small):
        free = compiled.generate(
            ids(100, 2)[:, 90:], state=compiled.prefill(ids(100, 2)[:, :90]), max_new_tokens=8, do_sample=False
        )[:, 10:].tolist()
        stops = [token for token in free[0][:5] if token not in free[1]]
        assert stops, "a token that ends one row only"
        criteria = {"eos_token_id": stops[0], "do_sample": False, "pad_token_id": 0}
        together = compiled.prefill(ids(100, 2)[:, :90])
        first = compiled.generate(ids(100, 2)[:, 90:], state=together, max_new_tokens=8, **criteria)
        assert 0 in first[0, 10:].tolist()
        second = compiled.generate(ids(6, 2, seed=4), state=together, max_new_tokens=6, do_sample=False)
        for row in range(2):
            alone = compiled.prefill(ids(100, 2)[row : row + 1, :90])
            own = compiled.generate(ids(100, 2)[row : row + 1, 90:], state=alone, max_new_tokens=8, **criteria)
            assert first[row, : own.shape[1]].tolist() == own[0].tolist()
            then = compiled.generate(ids(6, 2, seed=4)[row : row + 1], state=alone, max_new_tokens=6, do_sample=False)
            assert second[row].tolist() == then[0].tolist()
            assert alone.lengths[0] == together.lengths[row]
            assert alone.pending[0].tolist() == together.pending[row].tolist()


def test_extend_reads_the_pending_token_first(full):
    state = full.prefill(ids(20))
    made = full.generate(ids(2, seed=1), state=state, max_new_tokens=3, do_sample=False)
    logits = full.extend(state, ids(4, seed=2), all_logits=True)
    whole = full.prefill(torch.cat((ids(20), made, ids(4, seed=2)), 1))
    assert logits.shape == (1, 4, VOCAB)
    torch.testing.assert_close(logits[:, -1], whole.logits, rtol=1e-8, atol=1e-9)


def test_explain_has_a_row_per_site(small, capsys):
    text = semkv.explain(small, verbose=True)
    assert "held at most" not in text
    assert capsys.readouterr().out.strip() == text.strip()
    for site in small.program.sites:
        assert site.name in text
    assert text.count("GQA x2") == len(small.program.sites) == 2
    assert "50.0% of the device budget" in text.replace("\n", " ")
    assert "find_attention" in text


def test_explain_says_what_the_layers_of_a_state_held_and_read(small):
    state = small.prefill(ids(100))
    assert "no step yet" in semkv.explain(small, state)
    for seed in range(5):
        small.extend(state, ids(1, seed=seed))
    text, stats = semkv.explain(small, state).replace("\n", " "), state.stats
    assert f"in 5 steps a layer held at most {stats.device_share:.1%} of its full KV on the device" in text
    assert f"read at most {stats.attended_share:.1%} ({stats.attended_share_mean:.1%})" in text


def test_explain_says_what_is_beyond_the_budget(full):
    compiled = full.with_method("snapkv", budget=0.5, generated="kept")
    assert "the budget is the prompt's" in semkv.explain(compiled)
    state = compiled.prefill(ids(100))
    for seed in range(12):
        compiled.extend(state, ids(1, seed=seed))
    text, stats = semkv.explain(compiled, state).replace("\n", " "), state.stats
    assert stats.excess_share > 0
    beyond = f"at most {stats.excess_share:.1%} ({stats.excess_share_mean:.1%}) were beyond the budget, {state.nbytes['excess']} bytes"
    assert beyond in text


HOLES = torch.tensor([[1, 1, 0, 1, 1]])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"method": "h3o"}, ConfigError, "unknown method 'h3o'; there are: full, streaming_llm, snapkv, sekv"),
        ({"method": "snapkv", "budget": 0}, BudgetError, "budget 0: a whole number is tokens"),
        (
            {"method": "snapkv", "budget": 2.0},
            BudgetError,
            r"budget 2\.0: a fraction of the full KV must lie in \(0, 1\]",
        ),
        ({"method": "snapkv", "budget": float("nan")}, BudgetError, r"budget nan: a fraction"),
        ({"method": "snapkv", "budget": True}, BudgetError, "budget True: expected a fraction"),
        ({"method": "snapkv"}, BudgetError, "'snapkv' compresses, so it needs a budget"),
        ({"budget": 0.1}, ConfigError, r"budget 0\.1 without a method: .* such as method='sekv'"),
        (
            {"method": "snapkv", "budget": 0.1, "profile": "a/folder"},
            ConfigError,
            r"pass semkv\.Profile\.load\(folder\)",
        ),
        (
            {"method": "compresskv", "budget": 0.1},
            ConfigError,
            r"retrieval heads and layer errors: .* --steps retrieval-heads,layer-errors .*'allocation': 'uniform'",
        ),
        (
            {"method": "full", "budget": 0.5},
            BudgetError,
            r"'full' keeps everything: pass no budget with it \(got 0\.5\)",
        ),
        (
            {"method": "sekv", "budget": 0.5, "options": {"router": "trained"}},
            ConfigError,
            "'sekv' with router='trained' needs a profile with a trained router",
        ),
        (
            {"method": "sekv", "budget": 0.5, "options": {"router": "magic"}},
            ConfigError,
            "'magic'; expected one of 'coarse', 'trained'",
        ),
        (
            {"method": "sekv", "budget": 0.5, "options": {"fill": "no"}},
            ConfigError,
            "option 'fill' .* is 'no'; expected True or False",
        ),
        (
            {"method": "sekv", "budget": 0.5, "options": {"bits": 3}},
            ConfigError,
            "option 'bits' .* is 3; expected 4, 8 or 16",
        ),
        (
            {"method": "sekv", "budget": 0.5, "options": {"fixed_share": float("nan")}},
            ConfigError,
            "is nan; expected a number like",
        ),
        (
            {"method": "sekv", "budget": 0.5, "options": {"window": -4}},
            ConfigError,
            "is -4; expected a whole number like 512",
        ),
        (
            {"method": "sekv", "budget": 0.5, "options": {"depth": 2}},
            ConfigError,
            r"no option 'depth' \(it has: router, fill",
        ),
        (
            {"method": "snapkv", "budget": 0.5, "options": {"window": 65}},
            ConfigError,
            "option .window. .* is 65; expected 1 to 64 queries",
        ),
    ],
)
def test_bad_arguments_are_refused_before_any_work(model, monkeypatch, arguments, error, message):
    def never(*args, **kwargs):
        raise AssertionError("capture ran")

    monkeypatch.setattr("semkv.live.model.captured_program", never)
    arguments = dict(arguments)
    config = semkv.CompileConfig(method_options=arguments.pop("options", {}))
    with pytest.raises(error, match=message):
        semkv.compile(model, config=config, **arguments)


def test_what_is_no_model_or_configuration_is_refused(model, full):
    with pytest.raises(ConfigError, match=r"compiled already: compiled\.with_method"):
        semkv.compile(full)
    with pytest.raises(ConfigError, match=r"config is a dict: pass semkv\.CompileConfig"):
        semkv.compile(model, config={"floor": 0})
    with pytest.raises(ConfigError, match="explain: a LlamaForCausalLM"):
        semkv.explain(model)


@pytest.mark.parametrize(("budget", "kind"), [(np.int64(100), int), (np.float64(0.25), float)])
def test_numbers_of_numpy_are_numbers(full, budget, kind):
    assert type(full.with_method("snapkv", budget).budget) is kind


def test_auto_after_compilation():
    model, _ = semkv.bundled.load()
    compiled = semkv.compile(model, semkv.bundled.profile(), method="quest", budget=0.1)
    assert compiled.with_method("auto", 0.1).method.name == semkv.bundled.profile().best_method(0.1)


def test_a_model_in_training_mode_is_refused(model):
    other = copy.deepcopy(model).train()
    with pytest.raises(InputError, match=r"is in training mode.* call model\.eval\(\) first"):
        semkv.compile(other)


def test_a_profile_of_another_model_is_refused(model):
    profile = semkv.bundled.profile()
    with pytest.raises(ProfileError, match=r"another model|other model|belongs to"):
        semkv.compile(model, profile, method="snapkv", budget=0.5)
    with pytest.raises(ConfigError, match="a profile was given but no budget"):
        semkv.compile(model, profile)


def test_a_record_of_another_model_is_refused(model, full, small):
    """Of the same shape: its keys and values would be read as this model's."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(2.0)
    record = semkv.compile(other).prefill_record(ids(100), surprisal=True)
    with pytest.raises(InputError, match=r"made by another model \(\w+\) than this one \(\w+\)"):
        small.compress(record)
    assert small.compress(full.prefill_record(ids(100), surprisal=True)).rows  # another method's, of this model


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), {}, r"input ids are empty \(shape \(1, 0\)\)"),
        (torch.tensor([[3, VOCAB]]), {}, "reach from 3 to 41; this model's vocabulary is 0 to 40"),
        (torch.tensor([[-1, 3]]), {}, "reach from -1 to 3"),
        (torch.tensor([[0.5]]), {}, r"expected an integer tensor \[batch, tokens\], got torch.float32"),
        (ids(301), {}, "301 tokens do not fit the model's context of 300"),
        (ids(290), {"max_new_tokens": 12}, "290 tokens and 12 new ones do not fit the model's context of 300"),
        (ids(290), {"max_length": 302, "max_new_tokens": None}, "290 tokens and 12 new ones"),
        (ids(5), {"attention_mask": HOLES}, "mask of row 0 has holes: padding must be on the left or on the right"),
        (ids(5), {"attention_mask": torch.ones(1, 4)}, r"attention mask \(1, 4\) does not match input ids \(1, 5\)"),
        (ids(5), {"attention_mask": torch.zeros(1, 5)}, "is all zero: the row has no tokens"),
    ],
)
def test_bad_input_is_refused(full, prompt, options, message):
    with pytest.raises(InputError, match=message):
        full.generate(prompt, **({"max_new_tokens": 2} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_num_tokens": 3}, "a compressed memory cannot take tokens back"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "cannot take tokens back"),
        ({"use_cache": False}, "always runs on its state"),
        ({"past_key_values": object()}, r"is a State, made by prefill, and a object was given; pass state=\.\.\."),
        ({"prefill_chunk_size": 4}, r"CompileConfig\(prefill_chunk=\.\.\.\) sets their size"),
    ],
)
def test_what_generate_cannot_do_is_refused(full, options, message):
    with pytest.raises(ConfigError, match=message):
        full.generate(ids(5), max_new_tokens=2, **options)


def test_assisted_decoding_is_refused(full, model):
    with pytest.raises(ConfigError, match="assistant_model"):
        full.generate(ids(5), max_new_tokens=2, assistant_model=model)


def test_states_go_on_one_way(full, small):
    state = full.prefill(ids(20))
    for options in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
        with pytest.raises(ConfigError, match=r"a state goes on one way; make copies with state\.select"):
            full.generate(ids(2), state=state, max_new_tokens=2, **options)
    with pytest.raises(InputError, match="2 rows of ids for a state of 1 rows"):
        full.generate(ids(2, 2), state=state, max_new_tokens=2)
    with pytest.raises(InputError, match="made by another compiled model"):
        small.generate(ids(2), state=state, max_new_tokens=2)
    with pytest.raises(InputError, match="2 rows of ids for a state of 1 rows"):
        full.extend(state, ids(3, 2))
    with pytest.raises(InputError, match="301 tokens do not fit"):
        full.extend(state, ids(281))
