"""A tiny random Llama with a profile that was measured on it, so that every method runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from semkv import bundled
from semkv.api import compile as compile_model
from semkv.compiled import CompiledModel
from semkv.config import CompileConfig
from semkv.profiles.calibration import (
    STEPS,
    CalibrationData,
    CalibrationSettings,
    Job,
    MeasureData,
    MeasureSettings,
    run_steps,
)
from semkv.profiles.calibration.needles import NeedleQuestion, NeedleTest
from semkv.profiles.calibration.samples import SampleSet
from semkv.runtime.state import State

VOCABULARY = 60


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of `VOCABULARY` words, every sixth a full stop."""
    known = {("." * (i // 6 + 1) if i % 6 == 5 else f"word{i}"): i for i in range(VOCABULARY)}
    core = Tokenizer(models.WordLevel(known, unk_token="word0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="word0")


@pytest.fixture(scope="session")
def random_ids():
    """`random_ids(n, seed) -> ids int64 [n]` of the tiny model's vocabulary, without its padding token."""

    def draw(n: int, seed: int) -> torch.Tensor:
        return torch.randint(1, VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))

    return draw


@pytest.fixture(scope="session")
def profiled(random_ids, tmp_path_factory):
    """`profiled(model, latents=False) -> CompiledModel`: as `full`, with a profile of all sections from a few random tokens."""

    def make(model: PreTrainedModel, *, latents: bool = False) -> CompiledModel:
        training = CalibrationSettings(
            length=128, queries=8, max_steps=1, sequences=1, held_out=1, gate_hidden=8, budgets=(0.5,)
        )
        measuring = MeasureSettings.checked(
            length=96, steps=8, samples=2, held_out=1, keep=16, observation=4, sketch_rank=8, sketch_ranks=(8,), sketch_bits=(4,),
            pass_recall=0.0, retrieves=0.0,
        )  # fmt: skip
        data = CalibrationData(
            {length: (random_ids(length + 8, length),) for length in training.lengths},
            (random_ids(136, 1),),
            "random tokens",
        )
        sets = tuple(
            SampleSet(name, (random_ids(104, i),), (random_ids(104, 9 + i),)) for i, name in enumerate(("one", "two"))
        )
        answer = tuple(random_ids(5, 3).tolist())
        questions = tuple(
            NeedleQuestion(tuple(random_ids(7, i).tolist()), answer, tuple(range(20, 45))) for i in range(4)
        )
        needles = (NeedleTest(random_ids(96, 5), questions),)
        measured = MeasureData(sets, needles, "random tokens", words())
        job = Job(model, "tiny", "", data, training, measured, measuring, latents)
        made = run_steps(job, STEPS, work=Path(tmp_path_factory.mktemp("profile")))
        assert not made.skipped, made.notes
        return compile_model(model, made.profile, method="full", config=CompileConfig(latents=latents))

    return make


@pytest.fixture(scope="session")
def tiny(profiled) -> CompiledModel:
    """The tiny model. Its weights are so large that tokens depend on all of the prompt."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=1024, initializer_range=0.3, bos_token_id=1,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return profiled(LlamaForCausalLM(config).eval())


@pytest.fixture(scope="session")
def whole() -> CompiledModel:
    """The bundled model as `full`, its KV in half precision."""
    model, _ = bundled.load()
    return compile_model(model, bundled.profile(), method="full", config=CompileConfig(kv_dtype="float16"))


@pytest.fixture(scope="session")
def prompt():
    """`prompt(tokens, seed) -> ids int64 [1, tokens]` of the bundled model's vocabulary."""

    def draw(tokens: int, seed: int) -> torch.Tensor:
        return torch.randint(3, 600, (1, tokens), generator=torch.Generator().manual_seed(seed))

    return draw


def held_bytes(row) -> int:
    """What a row has on the device, counted tensor by tensor."""
    held = 0
    for memory in row.budgeted():
        held += memory.kept.nbytes + memory.recent.nbytes
        held += sum(x.nbytes for x in memory.spans.device_tensors()) if memory.spans else 0
        held += sum(x.nbytes for x in memory.workspace.tensors) if memory.workspace else 0
    return held


@pytest.fixture(scope="session")
def grown(prompt):
    """`grown(compiled, tokens, steps, size) -> state` after a prompt and some steps, its budget having been held at each."""

    def run(compiled: CompiledModel, tokens: int, steps: int, size: int) -> State:
        state = compiled.prefill(prompt(tokens, 1))
        for seed in range(steps):
            compiled.extend(state, prompt(size, seed))
            row = state.rows[0]
            assert held_bytes(row) == row.device_nbytes() == state.nbytes["device"]
            assert row.device_nbytes() <= row.cap_bytes(row.tokens)
        assert state.stats.peak_share <= 1
        return state

    return run
