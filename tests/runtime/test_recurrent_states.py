"""Hybrid models: recurrent states beside the memory, against the model with a cache of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import semkv
from semkv.errors import ConfigError
from semkv.model.huggingface import CACHE
from tests.conftest import quick_ones
from tests.eager_steps import eagerly
from tests.hybrids import SERVED, Alone, difference, hybrid, ids

PLAIN = semkv.CompileConfig(kernels="torch", floor=0)
QUICK = ("Lfm2", "Qwen3_5")
COMPRESSING = {"streaming_llm": {}, "snapkv": {}, "quest": {}, "sekv": {"router": "coarse"}}
PROMPT, STEPS = 480, 12


@pytest.fixture(scope="module")
def made():
    """`made(family)`: a model and what was compiled of it, once."""
    known: dict[str, tuple[torch.nn.Module, semkv.CompiledModel]] = {}

    def make(family: str) -> tuple[torch.nn.Module, semkv.CompiledModel]:
        if family not in known:
            model = hybrid(family)
            known[family] = model, semkv.compile(model, method="full", config=PLAIN)
        return known[family]

    return make


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows [1, n] as a batch padded on the left, and its mask."""
    longest = max(row.shape[1] for row in rows)

    def stacked(parts: list[Tensor]) -> Tensor:
        return torch.cat([torch.nn.functional.pad(x, (longest - x.shape[1], 0)) for x in parts])

    return stacked(rows), stacked([torch.ones_like(row) for row in rows])


@pytest.mark.parametrize("family", quick_ones(SERVED, QUICK))
def test_three_turns_of_ragged_rows(made, family: str) -> None:
    model, compiled = made(family)
    alone = [Alone(model) for _ in range(3)]
    state = None
    for turn, lengths in enumerate(([40, 23, 71], [12, 2, 30], [5, 9, 2])):
        rows = [ids(length, 10 * turn + row) for row, length in enumerate(lengths)]
        wanted = [one.answer(row, 6) for one, row in zip(alone, rows)]
        batch, mask = padded(rows)
        if state is None:
            result = compiled.generate(
                batch, attention_mask=mask, max_new_tokens=6, do_sample=False, return_dict_in_generate=True
            )
            made_tokens, state = result.sequences, result[CACHE]
        else:
            made_tokens = compiled.generate(batch, attention_mask=mask, max_new_tokens=6, do_sample=False, state=state)
        assert made_tokens[:, -6:].tolist() == wanted
    assert state.nbytes["recurrent"] == 3 * sum(site.nbytes for site in compiled.program.recurrences) > 0


@pytest.mark.parametrize("family", quick_ones(SERVED, QUICK))
def test_states_of_a_step_together(made, family: str) -> None:
    """Logits of several conversations in one step are the model's, and those of each by itself."""
    model, compiled = made(family)
    alone = [Alone(model) for _ in range(3)]
    texts = [ids(length, length) for length in (37, 60, 1)]
    states = [compiled.prefill(text) for text in texts]
    theirs = torch.cat([one.read(text)[:, -1] for one, text in zip(alone, texts)])
    assert difference(torch.cat([state.logits for state in states]), theirs) < 1e-4
    for _ in range(8):
        chosen = theirs.argmax(-1)
        mine = compiled.step(states, chosen)
        theirs = torch.cat([one.read(token[None, None])[:, -1] for one, token in zip(alone, chosen)])
        assert difference(mine, theirs) < 1e-4


def test_a_fork_and_its_origin_go_separate_ways(made) -> None:
    _, compiled = made("Lfm2")
    state = compiled.prefill(ids(50, 1))
    fork, untouched = state.fork(), state.fork()
    compiled.extend(state, ids(20, 2))
    assert torch.equal(compiled.extend(fork, ids(9, 3)), compiled.extend(untouched, ids(9, 3)))
    held = [x for states in fork.rows[0].recurrent.values() for x in states]
    others = [x for states in state.rows[0].recurrent.values() for x in states]
    assert {x.data_ptr() for x in held}.isdisjoint(x.data_ptr() for x in others)


def test_a_record_serves_several_states(made) -> None:
    _, compiled = made("Lfm2")
    record = compiled.prefill_record(ids(50, 1))
    first = compiled.compress(record)
    compiled.extend(first, ids(7, 2))
    assert torch.equal(compiled.extend(compiled.compress(record), ids(7, 2)), first.logits[:, None])


@pytest.mark.parametrize("family", quick_ones(SERVED, QUICK))
def test_saved_states_and_artifacts(made, family: str, tmp_path) -> None:
    _, compiled = made(family)
    state = compiled.prefill(ids(50, 1))
    compiled.extend(state, ids(3, 2))
    state.save(tmp_path / "state")
    compiled.save(tmp_path / "model")
    wanted = compiled.extend(state.fork(), ids(9, 3))
    loaded = semkv.load(tmp_path / "model")
    assert loaded.program.recurrences == compiled.program.recurrences
    assert torch.equal(compiled.extend(compiled.load_state(tmp_path / "state"), ids(9, 3)), wanted)
    assert difference(loaded.extend(loaded.load_state(tmp_path / "state"), ids(9, 3)), wanted) < 1e-5
    assert difference(loaded.prefill(ids(70, 4)).logits, compiled.prefill(ids(70, 4)).logits) < 1e-5


def test_a_prompt_in_chunks(made) -> None:
    _, compiled = made("Qwen3_5")
    chunked = compiled.with_method("full", config=PLAIN.model_copy(update={"prefill_chunk": 24}))
    text = ids(3 * 24 + 1, 5)  # the last chunk would be of one token
    mine, whole = chunked.prefill(text), compiled.prefill(text)
    assert difference(mine.logits, whole.logits) < 1e-5
    for x, y in zip(mine.rows[0].recurrent[0], whole.rows[0].recurrent[0]):
        assert difference(x, y) < 1e-5


@pytest.mark.parametrize("budget", [0.5, 0.1])
@pytest.mark.parametrize("method", COMPRESSING)
def test_methods_compress_beside_the_states(made, method: str, budget: float) -> None:
    """Steps of one row, of several and through the memory's protocol agree, and what the budget counts is within it."""
    _, compiled = made("Lfm2")
    options = COMPRESSING[method]
    length = 3 * PROMPT if method == "quest" else PROMPT
    small = compiled.with_method(method, budget, config=PLAIN, **options)
    slow = eagerly(compiled.with_method(method, budget, config=PLAIN, **options))
    state, other = small.prefill(ids(length, 1)), small.prefill(ids(length - 7, 2))
    alone, together = state.fork(), [state.fork(), other.fork()]
    asked = slow.prefill(ids(length, 1))
    for token in ids(STEPS, 3)[0]:
        wanted = small.extend(alone, token.view(1, 1))[:, 0]
        assert difference(small.step(together, token.expand(2))[:1], wanted) < 1e-5
        assert difference(slow.extend(asked, token.view(1, 1))[:, 0], wanted) < 1e-5
    assert alone.nbytes["device"] <= budget * alone.full_bytes
    assert alone.nbytes["recurrent"] == sum(site.nbytes for site in compiled.program.recurrences)
    assert state.stats.steps == 0


@pytest.mark.parametrize("family", quick_ones(SERVED, QUICK))
@pytest.mark.parametrize("method", ["streaming_llm", "snapkv"])
def test_compressed_steps_are_the_models_on_the_kept_tokens(made, family: str, method: str) -> None:
    """transformers' own cache, cut down to the tokens that the memory keeps, gives the same logits."""
    model, compiled = made(family)
    small = compiled.with_method(method, 0.5, config=PLAIN)
    text = ids(PROMPT, 1)
    state, alone = small.prefill(text), Alone(model)
    alone.read(text)
    state.reserve(STEPS)
    with_keys = [layer for layer in alone.past.layers if isinstance(getattr(layer, "keys", None), Tensor)]
    with_keys = [layer for layer in with_keys if layer.keys.numel()]
    assert len(with_keys) == len(small.program.stores)
    for layer, store in zip(with_keys, small.program.stores):
        (memory,) = state.rows[0].stores[store.store]
        places = [x.positions.expand(store.kv_heads, -1) for x in (memory.kept, memory.recent)]
        index = torch.cat(places, 1).long()[None, :, :, None]
        assert index.shape[2] < 0.55 * PROMPT
        layer.keys = layer.keys.gather(2, index.expand(-1, -1, -1, layer.keys.shape[-1]))
        layer.values = layer.values.gather(2, index.expand(-1, -1, -1, layer.values.shape[-1]))
    for token in ids(STEPS, 3)[0]:
        assert difference(small.extend(state, token.view(1, 1)), alone.read(token.view(1, 1))) < 1e-4


def test_a_row_that_outgrows_the_floor_keeps_its_states(made) -> None:
    _, compiled = made("Lfm2")
    small = compiled.with_method("snapkv", 0.1, config=PLAIN.model_copy(update={"floor": 64}))
    state, whole = small.prefill(ids(60, 1)), compiled.prefill(ids(60, 1))
    for start in range(0, 30, 5):
        text = ids(30, 2)[:, start : start + 5]
        small.extend(state, text)
        compiled.extend(whole, text)
    row = state.rows[0]
    assert not row.exact
    assert len(row.recurrent) == len(compiled.program.recurrences)
    # The first convolution stands before any attention, so nothing that is dropped reaches it.
    assert difference(row.recurrent[0][0], whole.rows[0].recurrent[0][0]) < 1e-5
    assert difference(row.recurrent[1][0], whole.rows[0].recurrent[1][0]) > 1e-5


def test_what_is_said_of_them(made, capsys) -> None:
    _, compiled = made("Lfm2")
    text = semkv.explain(compiled, verbose=True)
    assert (
        "recurrent states of 1280 bytes a row, whatever its length, beside the budget: model.layers.0.conv"
        in " ".join(text.split())
    )
    assert "recurrent model.layers.2.conv: its states are carried from piece to piece" in " ".join(text.split())


def test_an_exported_step_has_no_states(made, tmp_path) -> None:
    _, compiled = made("Lfm2")
    with pytest.raises(
        ConfigError, match=r"model\.layers\.0\.conv goes on from states of its own, as 1 more modules do"
    ):
        compiled.export(tmp_path / "step")
