"""A tiny random Llama with its captured program, and data for it."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from semkv.compiler.pipeline import captured_program
from semkv.passes.assign_budgets import AssignBudgets
from semkv.passes.base import PassOptions
from semkv.profiles.calibration import CalibrationData, CalibrationSettings, MeasureData, MeasureSettings
from semkv.profiles.calibration.measure import Subject
from semkv.profiles.calibration.needles import NeedleQuestion, NeedleTest
from semkv.profiles.calibration.samples import SampleSet

VOCABULARY = 40


def tiny_llama(seed=0, **changes) -> LlamaForCausalLM:
    """Two layers, four query heads on two KV heads of dim 16; large weights, so that attention looks far back."""
    torch.manual_seed(seed)
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
    } | changes
    return LlamaForCausalLM(LlamaConfig(**values)).eval()


def random_data(settings: CalibrationSettings, seed=0) -> CalibrationData:
    """Random token sequences."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> tuple[torch.Tensor, ...]:
        size = (settings.length + settings.queries,)
        return tuple(torch.randint(0, VOCABULARY, size, generator=generator) for _ in range(count))

    return CalibrationData(draw(settings.sequences), draw(settings.held_out), "random tokens")


@pytest.fixture(scope="session")
def model():
    return tiny_llama()


@pytest.fixture(scope="session")
def captured(model):
    return captured_program(model)


@pytest.fixture
def program(captured, model):
    """The annotated program."""
    return AssignBudgets().run(captured, PassOptions(method="sekv"))


@pytest.fixture(scope="session")
def settings():
    return CalibrationSettings(
        length=192,
        queries=8,
        max_steps=12,
        gate_steps=20,
        sequences=2,
        held_out=1,
        evaluate_every=4,
        gate_hidden=16,
        budgets=(0.5,),
    )


@pytest.fixture
def data(settings):
    return random_data(settings)


@pytest.fixture(scope="session")
def make_llama():
    return tiny_llama


@pytest.fixture(scope="session")
def make_data():
    return random_data


@pytest.fixture(scope="session")
def measure_settings():
    return MeasureSettings.checked(
        length=96,
        steps=12,
        samples=4,
        held_out=1,
        block=5,
        keep=16,
        observation=4,
        selectors=2,
        classic_top_k=3,
        sketch_stages=3,
        sketch_rounds=3,
        sketch_share=0.1,
        pass_recall=0.0,
    )


def random_measure_data(settings: MeasureSettings, seed=0) -> MeasureData:
    """Two data sets of random tokens, and needle tests whose answers are random too."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (length,), generator=generator)

    def draw_set(name: str) -> SampleSet:
        size = settings.length + settings.steps
        return SampleSet(name, (draw(size), draw(size)), (draw(size),))

    tests = []
    for _ in range(6):
        answer = tuple(draw(5).tolist())
        question = NeedleQuestion(tuple(draw(7).tolist()), answer, tuple(range(20, 45)))
        tests.append(NeedleTest(draw(settings.length), (question, question)))
    return MeasureData((draw_set("one"), draw_set("two")), tuple(tests), "random tokens", word_tokenizer())


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of `VOCABULARY` words; every fourth is a full stop."""
    words = {("." * (i // 4 + 1) if i % 4 == 3 else f"word{i}"): i for i in range(VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="word0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.fixture(scope="session")
def measure_data(measure_settings):
    return random_measure_data(measure_settings)


@pytest.fixture
def subject(program, measure_data, measure_settings):
    return Subject(program, measure_data, measure_settings)


@pytest.fixture(scope="session")
def dense_weights():
    """Attention weights of a model's layers on ids [T], each [Hq, T, T], by the modelling code's own attention."""

    def weights(model, ids):
        model.set_attn_implementation("eager")
        try:
            with torch.no_grad():
                return [layer[0] for layer in model(ids[None], output_attentions=True, use_cache=False).attentions]
        finally:
            model.set_attn_implementation("sdpa")

    return weights
