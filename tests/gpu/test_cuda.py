"""The same tokens on a CUDA device as on the CPU. Skipped where there is none; `benchmarks/gpu_suite.sh` runs them."""

from __future__ import annotations

import gc
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import semkv
from semkv.ir.ops import mixed_attention
from semkv.kernels.mixed_attention import mixed_attention_reference
from semkv.kernels.tuning import Tuning

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCAB = 61
METHODS = [("full", None, {}), ("streaming_llm", 0.4, {}), ("snapkv", 0.4, {}), ("sekv", 0.5, {"router": "coarse"})]


@pytest.fixture(scope="module")
def model(llama: Any) -> LlamaForCausalLM:
    return llama(VOCAB, 64, 4).double()


@pytest.fixture(scope="module")
def prompts() -> torch.Tensor:
    return torch.randint(1, VOCAB, (2, 300), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("method", "budget", "options"), METHODS, ids=[m for m, _, _ in METHODS])
def test_tokens_equal_those_of_the_cpu(
    model: Any, prompts: torch.Tensor, method: str, budget: float | None, options: dict
) -> None:
    config = semkv.CompileConfig(floor=0, method_options=options)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_runs_within_the_budget(model: Any, prompts: torch.Tensor, dtype: torch.dtype) -> None:
    half = LlamaForCausalLM(model.config).eval().to("cuda", dtype)
    config = semkv.CompileConfig(floor=0, method_options={"router": "coarse"})
    compiled = semkv.compile(half, method="sekv", budget=0.5, config=config)
    state = compiled.prefill(prompts.cuda())
    compiled.generate(prompts[:, :1].cuda(), state=state, max_new_tokens=40, do_sample=False)
    assert state.stats.peak_share <= 1.0
    memories = [memory for row in state.rows for memory in row.memories()]
    assert all(x.is_cuda for memory in memories for x in memory.recent.buffers)
    assert all(memory.spans.host_tokens.in_place for memory in memories), "folded tokens are to be page-locked"


def test_states_and_artifacts_move_between_devices(model: Any, prompts: torch.Tensor, tmp_path: Path) -> None:
    config = semkv.CompileConfig(floor=0, method_options={"router": "coarse"})
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


@pytest.fixture(scope="module")
def single(model: Any) -> Any:
    """The model in float32 on the GPU, as `full`."""
    there = LlamaForCausalLM(model.config).eval().to("cuda", torch.float32)
    there.load_state_dict({name: x.float() for name, x in model.state_dict().items()})
    return semkv.compile(there, config=semkv.CompileConfig(floor=0))


@pytest.mark.parametrize(
    ("method", "budget", "options"),
    [*METHODS, ("sekv", 0.5, {"router": "untrained", "forms": "factored"})],
    ids=[*(m for m, _, _ in METHODS), "sekv, factored"],
)
def test_steps_of_tritons_kernel_are_those_of_pytorch(
    single: Any, prompts: torch.Tensor, method: str, budget: float | None, options: dict
) -> None:
    """Two rows of one length, token by token."""
    logits = {}
    for kernels in ("torch", "auto"):
        config = semkv.CompileConfig(floor=0, kernels=kernels, extend_chunk=1)
        compiled = single.with_method(method, budget, config=config, **options)
        assert compiled.kernels.split(":")[0] == ("triton" if kernels == "auto" else "torch")
        state = compiled.prefill(prompts.cuda())
        logits[kernels] = compiled.extend(state, prompts[:, :8].cuda(), all_logits=True)
    torch.testing.assert_close(logits["auto"], logits["torch"], rtol=1e-4, atol=1e-5)
    assert not torch.equal(logits["auto"], logits["torch"]), "the same form answered both"


@pytest.mark.parametrize(("method", "budget", "options"), METHODS, ids=[m for m, _, _ in METHODS])
def test_steps_of_recorded_graphs_are_those_of_plain_ones(
    single: Any, prompts: torch.Tensor, method: str, budget: float | None, options: dict
) -> None:
    """One row and two, step by step; earlier logits stay what they were."""
    for rows in (1, 2):
        logits = {}
        for graphs in (False, True):
            config = semkv.CompileConfig(floor=0, cuda_graphs=graphs)
            compiled = single.with_method(method, budget, config=config, **options)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*without a CUDA graph")
                state = compiled.prefill(prompts[:rows].cuda())
                logits[graphs] = [compiled.extend(state, prompts[:rows, n : n + 1].cuda()) for n in range(8)]
        torch.testing.assert_close(logits[True], logits[False], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "budget", "options"),
    [*METHODS, ("quest", 0.4, {}), ("h2o", 0.4, {})],
    ids=[*(m for m, _, _ in METHODS), "quest", "h2o"],
)
def test_a_step_that_is_one_recorded_graph_is_the_plain_one(
    single: Any, prompts: torch.Tensor, method: str, budget: float | None, options: dict
) -> None:
    """Step by step, over some in which windows fold; what waits is read in page-locked memory; earlier logits stay what they were."""
    logits = {}
    for graphs in (False, "step"):
        config = semkv.CompileConfig(floor=0, cuda_graphs=graphs)
        compiled = single.with_method(method, budget, config=config, **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*without a CUDA graph")
            state = compiled.prefill(prompts[:1].cuda())
            logits[graphs] = [compiled.extend(state, prompts[:1, n : n + 1].cuda()) for n in range(40)]
        assert (compiled.placement.steps is not None) == (graphs == "step")
    torch.testing.assert_close(logits["step"], logits[False], rtol=1e-4, atol=1e-5)


def test_recorded_graphs_outlive_what_others_let_go_of(llama: Any) -> None:
    """`torch.compile` clears the workspaces of cuBLAS, and dropping another model's graphs those of their stream."""
    model = llama(VOCAB, 2048, 16).to("cuda", torch.bfloat16)
    ids = torch.randint(1, VOCAB, (1, 64), generator=torch.Generator().manual_seed(1)).cuda()
    compiled, other = semkv.compile(model), semkv.compile(model)
    wanted = [one.generate(ids, max_new_tokens=8, do_sample=False).tolist() for one in (compiled, other)]
    assert wanted[0] == wanted[1]
    del other
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    assert compiled.generate(ids, max_new_tokens=8, do_sample=False).tolist() == wanted[0]


def test_threads_step_at_once_with_graphs_of_their_own(single: Any, prompts: torch.Tensor) -> None:
    compiled = single.with_method("snapkv", 0.4, config=semkv.CompileConfig(floor=0, cuda_graphs=True))
    plain = single.with_method("snapkv", 0.4)
    alone = [plain.generate(row[None].cuda(), max_new_tokens=24, do_sample=False).tolist() for row in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = pool.map(lambda row: compiled.generate(row[None].cuda(), max_new_tokens=24, do_sample=False), prompts)
        assert [tokens.tolist() for tokens in found] == alone


def test_a_tuned_layout_gives_the_same_tokens(
    single: Any, prompts: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMKV_CACHE", str(tmp_path / "cache"))
    compiled = single.with_method("sekv", 0.5, router="coarse")
    tuned = compiled.tune_kernels()
    kept = Tuning.load(tmp_path / "cache" / "kernels.json")
    assert list(kept.layouts) == [torch.cuda.get_device_name()]
    assert kept == tuned.tuning
    wanted = compiled.generate(prompts.cuda(), max_new_tokens=8, do_sample=False)
    assert tuned.generate(prompts.cuda(), max_new_tokens=8, do_sample=False).tolist() == wanted.tolist()
    tuned.save(tmp_path / "model")
    assert semkv.load(tmp_path / "model", device="cuda").tuning == tuned.tuning


def test_a_prompt_in_chunks_gives_the_tokens_of_one_piece(model: Any, prompts: torch.Tensor) -> None:
    found = []
    for chunk in (64, 4096):
        config = semkv.CompileConfig(floor=0, prefill_chunk=chunk, method_options={"router": "coarse"})
        compiled = semkv.compile(model, method="sekv", budget=0.5, config=config, device="cuda")
        found.append(compiled.generate(prompts.cuda(), max_new_tokens=24, do_sample=False).tolist())
    assert found[0] == found[1]
