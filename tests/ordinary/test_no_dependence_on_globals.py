"""Globals of the process and modes of the caller's thread change no answer: whoever sets them, before, after or meanwhile."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import semkv
from semkv.compiled import CompiledModel

VOCAB = 97
METHODS = {
    "full": (None, {}),
    "snapkv": (0.5, {}),
    "sekv": (0.5, {"router": "coarse"}),
    "quest": (0.5, {}),
    "semanticache": (0.5, {}),
    "shadowkv": (0.5, {}),
}
"""One that keeps all, one that evicts, segments with codes, pages, clusters, and a low-rank index of codes."""


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(4.0)
    return model


def compiled_for(model: LlamaForCausalLM) -> CompiledModel:
    """Captured now: what the cache's folder holds may be of quieter times."""
    return semkv.compile(model, config=semkv.CompileConfig(cache=False))


@pytest.fixture(scope="module")
def quiet(model) -> CompiledModel:
    """Compiled while nothing was set."""
    return compiled_for(model)


class Answer(NamedTuple):
    """Everything that the calls of `conversation` returned."""

    prefill: torch.Tensor
    extend: torch.Tensor
    tokens: torch.Tensor
    scores: torch.Tensor
    again: torch.Tensor
    beams: torch.Tensor
    nbytes: dict[str, int]


PROMPT = torch.randint(2, VOCAB, (2, 150), generator=torch.Generator().manual_seed(1))
QUESTION = torch.randint(2, VOCAB, (2, 9), generator=torch.Generator().manual_seed(2))


def conversation(compiled: CompiledModel, folder: Path) -> Answer:
    """A prompt, a question, an answer, its state saved and loaded, the artifact saved and loaded, and a turn of each."""
    state = compiled.prefill(PROMPT)
    prefill = state.logits.clone()
    extend = compiled.extend(state, QUESTION, all_logits=True)
    state.save(folder / "state")
    made = compiled.generate(
        QUESTION[:, :3],
        state=state,
        max_new_tokens=6,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    compiled.save(folder / "artifact")
    other = semkv.load(folder / "artifact")
    again = other.extend(other.load_state(folder / "state"), QUESTION[:, :3], all_logits=True)
    beams = compiled.generate(PROMPT[:1], max_new_tokens=3, do_sample=False, num_beams=2)
    return Answer(prefill, extend, made.sequences, torch.stack(made.scores), again, beams, state.nbytes)


def assert_same(found: Answer, wanted: Answer) -> None:
    for name in Answer._fields[:-1]:
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype, name
        assert one.device == other.device, name
        assert torch.equal(one, other), f"{name} differs by {float((one - other).abs().max())}"
    assert found.nbytes == wanted.nbytes


@pytest.fixture(scope="module")
def wanted(quiet, tmp_path_factory) -> dict[str, Answer]:
    """What each method answers while nothing is set."""
    return {name: conversation(of(quiet, name), tmp_path_factory.mktemp(name)) for name in METHODS}


def of(compiled: CompiledModel, name: str) -> CompiledModel:
    budget, options = METHODS[name]
    return compiled if name == "full" else compiled.with_method(name, budget, **options)


# -- what others set ---------------------------------------------------------------------------------------------------


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def gradients(enabled: bool) -> Iterator[None]:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(enabled)
    try:
        yield
    finally:
        torch.set_grad_enabled(before)


@contextmanager
def deterministic() -> Iterator[None]:
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def another_seed() -> Iterator[None]:
    """Other numbers in every generator of the process."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.manual_seed(12345)
    random.seed(12345)
    np.random.seed(12345)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


HOSTILE = {
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype float16": lambda: default_dtype(torch.float16),
    "default device meta": lambda: default_device("meta"),
    "device context meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "gradients": lambda: gradients(True),
    "no gradients": lambda: gradients(False),
    "deterministic": deterministic,
    "warnings are errors": warnings_are_errors,
    "numpy raises": lambda: np.errstate(all="raise"),
    "another seed": another_seed,
}


TOGETHER = {
    "first": ("default dtype bfloat16", "default device meta", "deterministic", "warnings are errors", "gradients"),
    "second": ("default dtype float64", "autocast", "inference mode", "another seed"),
    "third": ("default dtype float16", "device context meta", "no gradients", "numpy raises"),
}
"""All of them, several at once; each by itself is a slow test."""

Hostile = Callable[[], AbstractContextManager]


def hostile_of(names: tuple[str, ...]) -> Hostile:
    """What sets these globals; what was there before comes back at its end."""

    @contextmanager
    def setting() -> Iterator[None]:
        before = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(HOSTILE[name]())
            yield
        assert (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()) == before

    return setting


@pytest.fixture(
    params=[
        *(pytest.param(names, id=name) for name, names in TOGETHER.items()),
        *(pytest.param((name,), id=name, marks=pytest.mark.slow) for name in HOSTILE),
    ]
)
def hostile(request) -> Hostile:
    return hostile_of(request.param)


def test_every_global_is_in_the_default_tests() -> None:
    assert sorted(HOSTILE) == sorted(name for names in TOGETHER.values() for name in names)


# -- the same answer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_set_after_compiling(name, hostile, quiet, wanted, tmp_path) -> None:
    compiled = of(quiet, name)
    with hostile():
        found = conversation(compiled, tmp_path)
    assert_same(found, wanted[name])


def test_set_before_compiling(hostile, model, quiet, wanted, tmp_path) -> None:
    """The program is the same, and so are its answers without the globals."""
    with hostile():
        compiled = compiled_for(model)
        small = of(compiled, "sekv")
    for label in ("body", "head", "prefill", "extend", "decode"):
        assert str(getattr(compiled.program, label).graph) == str(getattr(quiet.program, label).graph)
    assert_same(conversation(small, tmp_path), wanted["sekv"])


def test_a_state_goes_on_under_other_globals_than_it_was_made_under(hostile, quiet, wanted) -> None:
    """A state that was made in inference mode among them, which could not be changed outside of it."""
    compiled = of(quiet, "sekv")
    with hostile():
        state = compiled.prefill(PROMPT)
    assert torch.equal(compiled.extend(state, QUESTION, all_logits=True), wanted["sekv"].extend)
    state = compiled.prefill(PROMPT)
    with hostile():
        found = compiled.extend(state.fork(), QUESTION, all_logits=True)
    assert torch.equal(found, wanted["sekv"].extend)


# -- from another thread -----------------------------------------------------------------------------------------------


@contextmanager
def in_another_thread(*settings) -> Iterator[list[int]]:
    """Another thread calls the settings in turn, again and again; yields how often it did."""
    turns, stop = [0], threading.Event()

    def work() -> None:
        while not stop.is_set():
            settings[turns[0] % len(settings)]()
            turns[0] += 1
            stop.wait(1e-4)

    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield turns
    finally:
        stop.set()
        thread.join()
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)


DTYPES = tuple(
    lambda dtype=dtype: torch.set_default_dtype(dtype) for dtype in (torch.bfloat16, torch.float64, torch.float32)
)


@pytest.mark.parametrize("name", METHODS)
def test_the_default_dtype_switched_by_another_thread(name, quiet, wanted, tmp_path) -> None:
    """As every `from_pretrained(dtype=...)` of another thread does."""
    compiled = of(quiet, name)
    with in_another_thread(*DTYPES) as turns:
        found = conversation(compiled, tmp_path)
        assert turns[0] > 20, "it was not switched often enough to show anything"
    assert_same(found, wanted[name])


def test_the_default_dtype_switched_while_compiling(model, wanted, tmp_path) -> None:
    """And nothing is drawn from the process's generators meanwhile."""
    numbers = torch.get_rng_state(), random.getstate()
    with in_another_thread(*DTYPES) as turns:
        compiled = compiled_for(model)
        assert turns[0] > 20
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert random.getstate() == numbers[1]
    assert_same(conversation(compiled, tmp_path), wanted["full"])


def test_threads_changed_by_another_thread(quiet, wanted, tmp_path) -> None:
    """PyTorch's products may be summed in another order, so answers are close, and tokens are the same."""
    compiled = of(quiet, "sekv")
    with in_another_thread(lambda: torch.set_num_threads(2), lambda: torch.set_num_threads(1)) as turns:
        found = conversation(compiled, tmp_path)
        assert turns[0] > 20
    assert torch.equal(found.tokens, wanted["sekv"].tokens)
    for name in ("prefill", "extend", "scores", "again"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted["sekv"], name), rtol=1e-4, atol=1e-4)


# -- and nothing of it is touched --------------------------------------------------------------------------------------


def test_no_generator_of_the_process_is_read(quiet, tmp_path) -> None:
    """Lowering for a method and answering greedily draw no number from anybody's sequence."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for name in METHODS:
        conversation(of(quiet, name), tmp_path / name)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


def test_the_modes_of_the_caller_are_as_they_were(quiet) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"), torch.enable_grad():
        quiet.generate(PROMPT[:1, :20], max_new_tokens=2, do_sample=False)
        assert torch.is_autocast_enabled("cpu")
        assert torch.empty(1).is_meta
        assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_the_globals_that_are_set_here_matter(model) -> None:
    """The control: the same forward in plain PyTorch is another one under autocast, and its tensors are of another dtype or nowhere."""
    ids = PROMPT[:1, :20]
    with torch.no_grad():
        plain = model(ids).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not torch.equal(model(ids).logits, plain)
    with default_dtype(torch.bfloat16):
        assert torch.zeros(1).dtype == torch.bfloat16
    with default_device("meta"):
        assert torch.zeros(1).is_meta
