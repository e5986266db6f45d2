"""Tokens of exported steps are ours: in stock onnxruntime, and where semkv cannot be imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import semkv
from semkv.compiled import CompiledModel
from semkv.config import CompileConfig
from tests.export.steps import BUDGETS, differences, in_onnxruntime, reserved

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="semkv[onnx] is not installed",
)
TWO_ROWS = (700, 523)
QUICK = ("full",)
FREE = {"full": {}, "quest": {}, "sekv": {}, "compresskv": {"selection": "all", "allocation": "uniform"}}
"""Methods that need no profile, with the options with which they do not."""


def of(full: CompiledModel, method: str, **options: Any) -> CompiledModel:
    if method == "full":
        return full
    return full.with_method(method, BUDGETS[method], config=CompileConfig(floor=0), **options)


@needs_onnx
@pytest.mark.parametrize("method", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in BUDGETS])
def test_onnxruntime_gives_our_tokens(full: CompiledModel, method: str, tmp_path: Path) -> None:
    assert differences(of(full, method), tmp_path / "step", "onnx", (TWO_ROWS, (611,))) == []


@needs_onnx
@pytest.mark.slow
def test_coarse_entries_and_thresholds(full: CompiledModel, tmp_path: Path) -> None:
    compiled = of(full, "sekv", coarse=True, fill=False, router="trained")
    assert differences(compiled, tmp_path / "step", "onnx", (TWO_ROWS,)) == []


@needs_onnx
@pytest.mark.slow
def test_tokens_in_4_bits(full: CompiledModel, tmp_path: Path) -> None:
    """With keys in even channels, and first tokens in 8 bits beside them."""
    compiled = full.with_method("sketch", 0.1, config=CompileConfig(floor=0), exact_form="int4")
    assert differences(compiled, tmp_path / "step", "onnx", (TWO_ROWS,), bits=4) == []


@needs_onnx
def test_rows_that_are_exact_share_a_batch_with_others(tiny: CompiledModel, tmp_path: Path) -> None:
    compiled = tiny.with_method("quest", 0.25)
    assert differences(compiled, tmp_path / "step", "onnx", ((900, 100),)) == []


@needs_onnx
@pytest.mark.parametrize("method", ["full", pytest.param("quest", marks=pytest.mark.slow)])
def test_a_token_without_a_place_makes_the_step_fail(tiny: CompiledModel, tmp_path: Path, method: str) -> None:
    """Its memory would be without that token, and what follows be wrong."""
    compiled = tiny if method == "full" else tiny.with_method("quest", 0.25)
    compiled.export(tmp_path / "step")
    compiled.export_state(reserved(compiled, (600,), 16), tmp_path / "step" / "state.safetensors")
    in_onnxruntime(tmp_path / "step", 16)
    with pytest.raises(Exception, match=r"(?i)out of (range|bounds)|GatherElements"):
        in_onnxruntime(tmp_path / "step", 100)


@pytest.mark.slow
def test_a_package_gives_our_tokens_without_semkv(tiny: CompiledModel, tmp_path: Path) -> None:
    assert differences(tiny, tmp_path / "step", "aoti", ((90, 61), (40, 70, 55))) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", BUDGETS)
def test_a_package_gives_our_tokens_for_every_method(full: CompiledModel, method: str, tmp_path: Path) -> None:
    assert differences(of(full, method), tmp_path / "step", "aoti", (TWO_ROWS, (611,))) == []


def architecture(name: str) -> torch.nn.Module:
    """A tiny model of random weights."""
    import transformers

    torch.manual_seed(0)
    own: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    }
    more: dict[str, dict[str, Any]] = {
        "Llama": own,
        "Qwen3": own | {"head_dim": 8},
        "Gemma2": own
        | {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 2048},
        "Qwen3Moe": own | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    }
    config = getattr(transformers, f"{name}Config")(
        vocab_size=97, initializer_range=0.3, bos_token_id=None, eos_token_id=None, **more[name]
    )
    made = transformers.AutoModelForCausalLM.from_config(config)
    return made.eval()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", [pytest.param("onnx", marks=needs_onnx), "aoti"])
@pytest.mark.parametrize("method", FREE)
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma2", "GPT2", "Qwen3Moe"])
def test_architectures(name: str, method: str, form: str, tmp_path: Path) -> None:
    settings = CompileConfig(floor=0, method_options=FREE[method])
    compiled = semkv.compile(architecture(name), method=method, budget=BUDGETS[method], config=settings)
    assert differences(compiled, tmp_path / "step", form, ((500, 330),)) == []
