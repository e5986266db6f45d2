"""The same tokens on a CUDA device as on the CPU. Skipped where there is none; `benchmarks/gpu_suite.sh` runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import semkv
from semkv.ir.ops import mixed_attention
from semkv.kernels.mixed_attention import mixed_attention_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = 61
METHODS = [("full", None, {}), ("streaming_llm", 0.4, {}), ("snapkv", 0.4, {}), ("sekv", 0.5, {"router": "coarse"})]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().double()


@pytest.fixture(scope="module")
def prompts() -> torch.Tensor:
    return torch.randint(1, VOCAB, (2, 300), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("method", "budget", "options"), METHODS, ids=[m for m, _, _ in METHODS])
def test_tokens_equal_those_of_the_cpu(
    model: Any, prompts: torch.Tensor, method: str, budget: float | None, options: dict
) -> None:
    config = semkv.CompileConfig(method_options=options)
    here = semkv.compile(model, method=method, budget=budget, config=config)
    there = semkv.compile(model, method=method, budget=budget, config=config, device="cuda")
    assert there.device.type == "cuda"
    assert next(model.parameters()).device.type == "cpu", "the user's model must stay where it is"
    wanted = here.generate(prompts, max_new_tokens=24, do_sample=False)
    found = there.generate(prompts.cuda(), max_new_tokens=24, do_sample=False)
    assert found.device.type == "cuda"
    assert found.cpu().tolist() == wanted.tolist()


def test_full_equals_the_model_itself(model: Any, prompts: torch.Tensor) -> None:
    moved = semkv.compile(model, device="cuda")
    wanted = model.generate(prompts, max_new_tokens=24, do_sample=False)
    assert moved.generate(prompts.cuda(), max_new_tokens=24, do_sample=False).cpu().tolist() == wanted.tolist()


@pytest.mark.parametrize("residency", ["shared", "elastic"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_runs_within_the_budget(
    model: Any, prompts: torch.Tensor, dtype: torch.dtype, residency: str
) -> None:
    half = LlamaForCausalLM(model.config).eval().to("cuda", dtype)
    config = semkv.CompileConfig(residency=residency, method_options={"router": "coarse"})
    compiled = semkv.compile(half, method="sekv", budget=0.5, config=config)
    state = compiled.prefill(prompts.cuda())
    compiled.generate(prompts[:, :1].cuda(), state=state, max_new_tokens=40, do_sample=False)
    assert state.stats.peak_share <= 1.0
    assert all(memory.recent.k.is_cuda for row in state.rows for memory in row.stores.values())


def test_states_and_artifacts_move_between_devices(model: Any, prompts: torch.Tensor, tmp_path: Path) -> None:
    config = semkv.CompileConfig(method_options={"router": "coarse"})
    compiled = semkv.compile(model, method="sekv", budget=0.5, config=config, device="cuda")
    state = compiled.prefill(prompts.cuda())
    state.save(tmp_path / "state")
    compiled.save(tmp_path / "model")
    again = semkv.load(tmp_path / "model")
    loaded = again.load_state(tmp_path / "state")
    turn = prompts[:, :10]
    wanted = compiled.generate(turn.cuda(), state=state, max_new_tokens=12, do_sample=False)
    assert again.generate(turn, state=loaded, max_new_tokens=12, do_sample=False).tolist() == wanted.cpu().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_operator_is_as_exact_as_plain_pytorch(dtype: torch.dtype) -> None:
    """Error against float64 at most twice that of the reference in the same dtype."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((1, 8, 1, 60), (1, 2, 111, 60), (1, 2, 111, 60)))
    at, positions = torch.tensor([[110]]), torch.arange(111)[None, None]
    exact = mixed_attention_reference(q.double(), at, [k.double()], [v.double()], [positions], scale=0.1)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    plain = mixed_attention_reference(q, at, [k], [v], [positions], scale=0.1)
    on_gpu = mixed_attention(q.cuda(), at.cuda(), [k.cuda()], [v.cuda()], [positions.cuda()], scale=0.1).cpu()
    allowed = 2 * (plain.double() - exact).abs().max() + 1e-6
    assert (on_gpu.double() - exact).abs().max() <= allowed
