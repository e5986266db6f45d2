"""Runs recorded and replayed by a stand-in for a CUDA graph: what it replays reads and writes the recording's own memory alone."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import LlamaConfig, LlamaForCausalLM

import semkv
from semkv.errors import ConfigError
from semkv.kernels import cuda_graphs
from semkv.kernels.cuda_graphs import MOST_PLACES, OfThread, RecordedRun, RecordedStep, is_recordable, record_runs
from semkv.kernels.tables import ROOM, Tables, kept_in, sent
from semkv.runtime.decode.steps import extend
from tests.conftest import quick_ones
from tests.eager_steps import eagerly


class Recorder:
    """Like a CUDA graph: a replay computes from the memory that the function read when it was recorded, and writes to the memory that it
    returned then. Nothing of an earlier replay is left there."""

    made: int = 0
    replays: int = 0

    def __call__(
        self, function: Callable[[], Sequence[Any]], *, whole: bool = False
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        given = inspect.getclosurevars(function).nonlocals["places"] if whole else []
        before = [(x, x.clone()) for x in given if isinstance(x, torch.Tensor)]
        returned = [x.clone() if isinstance(x, torch.Tensor) else x for x in function()]
        for x, was in before:  # as recording runs nothing
            x.copy_(was)
        Recorder.made += 1

        def replay() -> None:
            Recorder.replays += 1
            for kept, x in zip(returned, function()):
                if isinstance(x, torch.Tensor):
                    kept.copy_(x)

        return replay, returned


@pytest.fixture(autouse=True)
def counted() -> None:
    Recorder.made = Recorder.replays = 0


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
    return make_fx(function, pre_dispatch=True)(*inputs)


def runs(module: GraphModule) -> list[RecordedRun]:
    calls = [node.target for node in module.graph.nodes if node.op == "call_function"]
    return [call.__closure__[0].cell_contents for call in calls if getattr(call, "__name__", "").startswith("run_")]


def turned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x * 2 + 1).transpose(0, 1), x.sum() / x.shape[0]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_a_replay_computes_what_the_nodes_do_and_leaves_earlier_results_alone():
    module = record_runs(traced(turned, drawn(3, 4)), Recorder)
    assert len(runs(module)) == 1
    kept = []
    for seed in range(4):
        x = drawn(3, 4, seed=seed)
        kept.append((module(x), turned(x)))
    for got, expected in kept:  # after all steps: no replay wrote into what an earlier one returned
        for mine, theirs in zip(got, expected):
            assert torch.equal(mine, theirs)
    assert (Recorder.made, Recorder.replays) == (1, 4)


@torch.no_grad()
def test_each_size_and_each_place_of_a_weight_has_a_recording():
    linear = torch.nn.Linear(4, 2)
    module = record_runs(traced(lambda x: (x @ linear.weight.t() + linear.bias).relu(), drawn(3, 4)), Recorder)
    (run,) = runs(module)
    for rows in (3, 1, 3):
        x = drawn(rows, 4, seed=rows)
        torch.testing.assert_close(module(x), linear(x).relu())
    assert Recorder.made == 2
    for weight in run._weights:
        weight.data = weight.data * 2
    x = drawn(3, 4)
    torch.testing.assert_close(module(x), linear(x).relu())
    assert Recorder.made == 3


def test_gradients_flow_through_the_nodes_themselves():
    module = record_runs(traced(turned, drawn(3, 4)), Recorder)
    x = drawn(3, 4).requires_grad_()
    module(x)[0].sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 2.0))
    assert Recorder.made == 0


@torch.no_grad()
def test_what_cannot_be_recorded_is_computed_as_before():
    def refuses(function: Callable[[], Any], *, whole: bool) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    module = record_runs(traced(turned, drawn(3, 4)), lambda: refuses)
    x = drawn(3, 4)
    with pytest.warns(UserWarning, match=r"without a CUDA graph, which is slower: .* \(operation not permitted"):
        got = module(x)
    assert torch.equal(got[0], turned(x)[0])
    module(x)  # and is not tried again, which would warn


def test_a_recording_of_inference_mode_serves_other_callers():
    module = record_runs(traced(turned, drawn(3, 4)), Recorder)
    x = drawn(3, 4)
    for mode in (torch.inference_mode(), torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(module(x)[0], turned(x)[0])
    assert Recorder.made == 1


def test_what_looks_at_numbers_or_draws_them_is_not_recorded():
    def body(x: torch.Tensor, weight: torch.Tensor) -> Any:
        rows = torch.nonzero(x)
        x = torch.nn.functional.embedding(x, weight).add_(1)
        return torch.rand_like(x).relu() + x, rows

    module = traced(body, torch.arange(3), drawn(5, 2))
    told = {
        str(node.target).split(".")[1]: is_recordable(node) for node in module.graph.nodes if node.op == "call_function"
    }
    assert told["nonzero"] is told["add_"] is told["rand_like"] is False
    assert told["relu"] is told["embedding"] is True
    plain = symbolic_trace(torch.nn.Linear(2, 2))
    assert not any(is_recordable(node) for node in plain.graph.nodes)


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def compiled_and_recorded(llama, method: str, budget: float | None, **options: Any) -> tuple[Any, Any]:
    """A compiled model whose steps ask for entries, as they do on a GPU, and its program with recorded runs."""
    config = semkv.CompileConfig(floor=0, kernels="torch", method_options=options)
    compiled = eagerly(semkv.compile(llama, method=method, budget=budget, config=config))
    return compiled, compiled.program.evolve(decode=record_runs(compiled.program.decode, Recorder))


@pytest.mark.parametrize("rows", quick_ones([1, 3], [3]))
@pytest.mark.parametrize(("method", "options"), [("full", {}), ("snapkv", {}), ("sekv", {"router": "coarse"})])
def test_steps_give_the_bits_of_plain_ones(llama, method, options, rows):
    compiled, program = compiled_and_recorded(llama, method, None if method == "full" else 0.5, **options)
    ids = torch.randint(1, 61, (rows, 100), generator=torch.Generator().manual_seed(1))
    plain, recorded = compiled.prefill(ids), compiled.prefill(ids)
    with torch.no_grad():
        for _ in range(12):
            token = plain.logits.argmax(-1, keepdim=True)
            extend(compiled.program, plain, token, 1)
            extend(program, recorded, token, 1)
            assert torch.equal(recorded.logits, plain.logits)
    parts = len(runs(program.decode))
    assert parts == 3
    assert Recorder.made == parts
    assert Recorder.replays == 12 * parts * (1 if program.batched else rows)


def test_threads_have_recordings_of_their_own(llama):
    """States that step at once in several threads, in any order, give what they give alone."""
    compiled, program = compiled_and_recorded(llama, "snapkv", 0.5)
    prompts = [torch.randint(1, 61, (1, 90), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]

    def tokens(prompt: torch.Tensor, way: Any) -> list[int]:
        state, out = compiled.prefill(prompt), []
        with torch.no_grad():
            for _ in range(16):
                out.append(int(state.logits.argmax()))
                extend(way, state, torch.tensor([[out[-1]]]), 1)
        return out

    alone = [tokens(prompt, compiled.program) for prompt in prompts]
    got: list[list[int]] = [[] for _ in prompts]

    def work(place: int) -> None:
        got[place] = tokens(prompts[place], program)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == alone
    assert Recorder.made == len(prompts) * len(runs(program.decode))


def test_a_model_on_a_cpu_has_none(llama, tmp_path):
    with pytest.raises(
        ConfigError, match="cuda_graphs=True needs a CUDA device, and the model is on cpu: pass device='cuda'"
    ):
        semkv.compile(llama, config=semkv.CompileConfig(cuda_graphs=True))
    assert not semkv.CompileConfig().records(torch.device("cpu"))
    assert semkv.CompileConfig().records(torch.device("cuda"))
    assert not semkv.CompileConfig(cuda_graphs=False).records(torch.device("cuda"))
    compiled = semkv.compile(llama)
    compiled.settings = compiled.settings.model_copy(update={"cuda_graphs": True})  # as it is on a GPU
    compiled.save(tmp_path / "artifact")
    with pytest.warns(UserWarning, match="was saved with cuda_graphs=True; on cpu it runs without"):
        loaded = semkv.load(tmp_path / "artifact")
    assert not loaded.settings.cuda_graphs


@torch.no_grad()
def test_more_sizes_than_are_kept_are_told(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MOST_SIZES", 2)
    module = record_runs(traced(turned, drawn(3, 4)), Recorder)
    for rows in (1, 2):
        module(drawn(rows, 4))
    with pytest.warns(UserWarning, match="there are 2 recordings of other numbers of rows"):
        got = module(drawn(3, 4))
    assert torch.equal(got[0], turned(drawn(3, 4))[0])
    assert Recorder.made == 2


def counted_up(total: torch.Tensor, count: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A step: `total` and `count` are its state."""
    total.add_(x)
    count.add_(1)
    return total / count, x * 2


def a_step(recorder: Callable[[], Any] = Recorder) -> RecordedStep:
    module = make_fx(counted_up)(drawn(3), torch.zeros(()), drawn(3))
    return RecordedStep(module, frozenset({2}), OfThread(recorder))


@torch.no_grad()
def test_a_recorded_step_changes_its_state_where_it_is_and_once_a_step():
    step, total, count = a_step(), torch.zeros(3), torch.zeros(())
    kept = []
    for seed in range(6):
        got, twice = step(total, count, drawn(3, seed=seed))
        kept.append((got, sum(drawn(3, seed=s) for s in range(seed + 1)) / (seed + 1), twice, 2 * drawn(3, seed=seed)))
    assert float(count) == 6
    for got, mean, twice, double in kept:  # no replay wrote into what an earlier one returned
        torch.testing.assert_close(got, mean)
        torch.testing.assert_close(twice, double)
    assert (Recorder.made, Recorder.replays) == (1, 5)


@torch.no_grad()
def test_a_state_that_moves_is_recorded_again_and_few_places_are_kept():
    step, states = a_step(), []
    for _ in range(MOST_PLACES + 2):
        total, count = torch.zeros(3), torch.zeros(())
        states.append((total, count))
        for steps in (1, 2):
            torch.testing.assert_close(step(total, count, torch.ones(3))[0], torch.ones(3))
            assert float(count) == steps
    assert Recorder.made == Recorder.replays == MOST_PLACES + 2
    assert len(step._threads.steps[step]) == MOST_PLACES
    for places in (states[-1], states[0]):  # one that is kept, and one that is not
        step(*places, torch.ones(3))
    assert (Recorder.made, Recorder.replays) == (MOST_PLACES + 2, MOST_PLACES + 3)


@torch.no_grad()
def test_a_step_that_cannot_be_recorded_runs_node_by_node():
    def refuses(function: Callable[[], Any], *, whole: bool) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    step, total, count = a_step(lambda: refuses), torch.zeros(3), torch.zeros(())
    step(total, count, torch.ones(3))
    with pytest.warns(UserWarning, match=r"run without a CUDA graph, which is slower: .* \(operation not permitted"):
        step(total, count, torch.ones(3))
    step(total, count, torch.ones(3))  # and is not tried again, which would warn
    assert total.tolist() == [3, 3, 3]


def test_tables_of_a_recording_stay_apart_and_have_an_end():
    tables = Tables()
    with kept_in(tables):
        first, second = sent([1, 2, 3], torch.device("cpu")), sent([4, 5], torch.device("cpu"))
        with pytest.raises(RuntimeError, match="its tables have more than 65536 numbers"):
            sent([0] * ROOM, torch.device("cpu"))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [4, 5])
    after = sent([6], torch.device("cpu"))
    assert after.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
