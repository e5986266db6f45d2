"""`request_bytes` says no less than what a request allocates, for every method; and not much more on the device."""

from __future__ import annotations

from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

import semkv
from semkv.errors import ConfigError
from semkv.methods import METHODS
from semkv.runtime.host.tier import HostTier
from semkv.runtime.state import State

OPTIONS = {"heterocache": {"strict": True}, "omnikv": {"strict": True}}
KEPT = ("snapkv", "cake", "sentencekv")
LEAVES = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, str, int, float, torch.dtype, torch.device)


@pytest.fixture(scope="module")
def base():
    model, _ = semkv.bundled.load()
    config = semkv.CompileConfig(kv_dtype="float16")
    return semkv.compile(model, semkv.bundled.profile(), method="full", config=config)


def tokens(n: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 600, (1, n), generator=torch.Generator().manual_seed(seed))


def reached(roots: Iterable[Any], seen: set[int]) -> dict[int, int]:
    """Bytes by storage of all tensors that can be reached from `roots`, but for what was `seen`."""
    found, stack = {}, list(roots)
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, LEAVES):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, dict):
            stack += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            stack += one
        else:
            stack += vars(one).values() if hasattr(one, "__dict__") else ()
    return found


def allocated(state: State) -> int:
    """Bytes of all storages that a state alone has, found without its own count."""
    placement, seen = state.placement, set()
    shared = reached((placement, *placement.program.body.parameters(), *placement.program.body.buffers()), seen)
    own = reached((*state.rows, state.logits), seen)
    return sum(size for storage, size in own.items() if storage not in shared)


def grown(compiled, prompt: int, length: int):
    """A request at its prompt, after single steps, and at its end, which is read at once."""
    state = compiled.prefill(tokens(prompt))
    yield state
    for _ in range(25):
        compiled.step([state], state.logits.argmax(-1))
    yield state
    compiled.extend(state, tokens(length - prompt - 25, 1))
    yield state


def check(compiled, prompt: int, length: int) -> int:
    """The most that it had on the device."""
    bound, most = compiled.request_bytes(length, prompt), 0
    any_prompt = compiled.request_bytes(length)
    assert bound.device <= any_prompt.device
    assert bound.host <= any_prompt.host
    assert bound.reading <= any_prompt.reading
    for state in grown(compiled, prompt, length):
        held = state.nbytes
        most = max(most, state.logits.nbytes + sum(held[tier] for tier in ("device", "window", "resident", "reserved")))
        assert most <= bound.device
        assert held["host"] + held["disk"] <= bound.host <= bound.reading
        assert allocated(state) <= bound.device + bound.host
    return most


@pytest.mark.parametrize("method", [name for name, kind in METHODS.items() if not kind.needs_indexer])
def test_no_method_takes_more(base, method):
    compiled = base if method == "full" else base.with_method(method, 0.3, **OPTIONS.get(method, {}))
    assert compiled.request_bytes(1000).device < 1.5 * check(compiled, 900, 1000)  # a bound that says something


@pytest.mark.parametrize("method", ["streaming_llm", "quest", "sekv", "semanticache"])
def test_numbers_of_tokens_and_short_rows(base, method):
    check(base.with_method(method, 300), 700, 800)
    check(base.with_method(method, 0.1), 120, 220)


@pytest.mark.parametrize("method", KEPT)
def test_what_is_generated_may_stay(base, method):
    check(base.with_method(method, 0.3, generated="kept"), 600, 900)


def test_sliding_windows():
    config = MistralConfig(
        vocab_size=600,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=48,
        max_position_embeddings=2048,
    )
    compiled = semkv.compile(MistralForCausalLM(config).eval(), method="full")
    assert all(store.treatment == "window" for store in compiled.program.stores)
    check(compiled, 300, 400)
    check(compiled, 30, 700)


def test_layers_that_leave_the_device(base):
    config = semkv.CompileConfig(offload="progressive", device_memory="40MB", rows=1, floor=0)
    compiled = base.with_method("quest", 0.3, config=config)
    assert compiled.placement.thresholds
    check(compiled, 700, 800)


@pytest.mark.parametrize("method", ["quest", "h2o", "specontext"])
def test_reading_takes_no_more_either(base, method, monkeypatch):
    """All that the tier made at one time, counted where it is made."""
    config = semkv.CompileConfig(offload="budget", host_memory="1GB", kv_dtype="float16", prefill_chunk=128)
    compiled = base.with_method(method, 0.3, config=config)
    peak, take = [0], HostTier._take

    def counted(self, nbytes):
        fits = take(self, nbytes)
        peak[0] = max(peak[0], self._used)
        return fits

    monkeypatch.setattr(HostTier, "_take", counted)
    prompt = compiled.begin(700)
    prompt.feed(tokens(700)[0])
    state = prompt.finish()
    assert state.lengths == [700]
    assert 0 < peak[0] <= compiled.request_bytes(700).reading < 6 * peak[0]


def test_refusals(base):
    for length, prompt in ((0, None), (10, 11), (10, 0)):
        with pytest.raises(ConfigError, match="expected 1 <= prompt <= length, in tokens"):
            base.request_bytes(length, prompt)
