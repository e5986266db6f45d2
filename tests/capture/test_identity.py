"""What a captured program depends on is in the model's identity, and nothing that differs between equal models."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from semkv.capture.identity import model_identity
from semkv.errors import CaptureError


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=41,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny()


def test_equal_models_have_one_identity(model):
    assert model_identity(model) == model_identity(copy.deepcopy(model)) == model_identity(tiny())


def kinds() -> nn.Module:
    module = nn.Linear(2, 3)
    module.kinds = {"a", "b", "c", "d"}
    return module


def test_another_process_finds_the_same():
    code = "from torch import nn; from semkv.capture.identity import model_identity; m = nn.Linear(2, 3); "
    code += "m.kinds = set('abcd'); print(model_identity(m))"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "5"}
    )
    assert ran.stdout.strip() == model_identity(kinds())


def _buffer(model: nn.Module) -> None:
    model.model.rotary_emb.inv_freq[0] += 1e-6


def _attribute(model: nn.Module) -> None:
    model.model.layers[1].self_attn.scaling *= 1.5


def _configured(model: nn.Module) -> None:
    model.config.rms_norm_eps = 1e-3


def _implementation(model: nn.Module) -> None:
    model.set_attn_implementation("eager")


def _layer(model: nn.Module) -> None:
    class Norm(modeling_llama.LlamaRMSNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    model.model.norm.__class__ = Norm


def _forward(model: nn.Module) -> None:
    model.model.norm.forward = lambda x: 2 * x


def _dtype(model: nn.Module) -> None:
    model.double()


CHANGES = [_buffer, _attribute, _configured, _implementation, _layer, _forward, _dtype]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_what_a_capture_reads_counts(model, change: Callable[[nn.Module], None]):
    changed = copy.deepcopy(model)
    change(changed)
    assert model_identity(changed) != model_identity(model)


def test_a_replaced_function_of_the_models_code_counts(model, monkeypatch: pytest.MonkeyPatch):
    before = model_identity(model)
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: x)
    assert model_identity(model) != before


def test_functions_of_torch_count_by_name(model):
    """As activations that a module holds in an attribute; what is bound to an object has no name that says it."""
    one, other, bound = (copy.deepcopy(model) for _ in range(3))
    one.model.norm.act, other.model.norm.act = torch.nn.functional.gelu, torch.nn.functional.logsigmoid
    assert model_identity(one) != model_identity(other)
    assert model_identity(one) == model_identity(copy.deepcopy(one))
    bound.model.norm.act = {}.get
    with pytest.raises(CaptureError, match="cannot be read as data"):
        model_identity(bound)


def test_names_of_files_do_not_count(model):
    moved = copy.deepcopy(model)
    moved.name_or_path = moved.config._name_or_path = "elsewhere"
    assert model_identity(moved) == model_identity(model)


def test_hooks_and_unreadable_attributes_have_no_identity(model):
    hooked = copy.deepcopy(model)
    hooked.model.norm.register_forward_hook(lambda *args: None)
    with pytest.raises(CaptureError, match=r"module 'model\.norm' has hooks"):
        model_identity(hooked)
    strange = copy.deepcopy(model)
    strange.model.norm.table = object()
    with pytest.raises(CaptureError, match=r"model\.norm\.table is a object, which cannot be read as data"):
        model_identity(strange)
    deep: list = []
    for _ in range(20):
        deep = [deep]
    strange.model.norm.table = deep
    with pytest.raises(CaptureError, match="nested more than 8 deep"):
        model_identity(strange)
