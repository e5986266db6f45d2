"""Runs of nodes as instructions in C++, beside the same nodes one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import LlamaConfig, LlamaForCausalLM

import semkv
from semkv.compiler.kernel_builds import as_step, as_turns
from semkv.ir.graph import copy_graph_module, output_value
from semkv.kernels.cpp import compiler
from semkv.kernels.mixed_attention import mixed_attention
from semkv.kernels.segments import Segment, fuse, whole

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("nothing_is_written_by_luck"),
]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def traced(function, *inputs) -> GraphModule:
    return make_fx(function, pre_dispatch=True)(*inputs)


def segments(module: GraphModule) -> list[Segment]:
    calls = [node.target for node in module.graph.nodes if node.op == "call_function"]
    return [call.__closure__[0].cell_contents for call in calls if getattr(call, "__name__", "").startswith("run_")]


def runs_native(segment: Segment) -> bool:
    return segment.reason is None


ROWS = drawn(3, 1, 37)
FUNCTIONS = {
    "signs and roots": lambda x: (-x).square().add(0.1).rsqrt() + x.pow(2).sqrt() * x.pow(3),
    "waves": lambda x: torch.sin(300 * x) + torch.cos(x) / 3,
    "gates": lambda x: torch.sigmoid(8 * x) * torch.tanh(x) - F.silu(20 * x),
    "activations": lambda x: F.gelu(3 * x) + F.gelu(3 * x, approximate="tanh") + F.relu(x),
    "RMS normalisation": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "sums": lambda x: x / x.sum(-1)[..., None],
    "layer normalisation": lambda x: F.layer_norm(x, (37,), x[0, 0], x[1, 0], 1e-3) + F.layer_norm(x, (37,)),
    "halves turned": lambda x: torch.cat([-x[..., 18:], x[..., :18]], -1) * x.new_full((37,), 2.0)[:37],
    "pairs turned": lambda x: torch.stack([-x[..., 1:36:2], x[..., :36:2]], -1).flatten(-2).add(x[..., :36], alpha=0.5),
    "broadcasts": lambda x: x + x[:, :, :1] * x[:1] - x.transpose(0, 1)[..., 0][..., None],
    "heads": lambda x: x[..., :36].reshape(3, 1, 4, 9).transpose(1, 2).reshape(3, -1) * 2 + x[..., :36].flatten(1),
    "parts": lambda x: (
        torch.cat([part * 2 for part in x.split([5, 30, 2], -1)], -1) + x.chunk(2, -1)[0].mean(-1, keepdim=True)
    ),
    "scalars": lambda x: 1.0 * x / 7 + 2 - x,
    "expanded": lambda x: x[:, :, None].expand(3, 1, 2, 37).reshape(3, 74).clone() + 1,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_instructions_compute_what_pytorch_does(name):
    plain = traced(FUNCTIONS[name], ROWS)
    fused = fuse(plain)
    with torch.no_grad():
        got, expected = fused(ROWS), FUNCTIONS[name](ROWS.double())
        tolerance = 3 * float((plain(ROWS).double() - expected).abs().max()) + 4e-7 * float(expected.abs().max())
    assert [runs_native(segment) for segment in segments(fused)] == [True]
    assert got.shape == expected.shape
    assert float((got.double() - expected).abs().max()) <= tolerance


class Applied(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x) * 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1e4, 1e4])
def test_what_is_not_finite_stays_so(value):
    x = torch.full((1, 19), value)
    for function in (F.silu, F.relu, torch.tanh, torch.sigmoid, F.gelu, lambda x: F.gelu(x, approximate="tanh")):
        plain = traced(nn.Sequential(Applied(function)), x)
        with torch.no_grad():
            got, expected = fuse(plain)(x), plain(x)
        assert torch.equal(got.isfinite(), expected.isfinite())
        if expected.isfinite().all():
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-30)


class Layer(nn.Module):
    """Projections with and without a bias, an embedding, and something that there is no instruction for in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.wide, self.narrow = (
            nn.Embedding(11, 301),
            nn.Linear(301, 530),
            nn.Linear(530, 13, bias=False),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.wide(self.embedding(ids) * 2))
        return F.log_softmax(self.narrow(x + x.mean(-1, keepdim=True)), -1) * 3 + 1


@pytest.fixture(scope="module")
def layer() -> GraphModule:
    """As passes leave a graph: it returns a tensor."""
    rows = {0: torch.export.Dim("rows", max=64)}
    exported = torch.export.export(Layer(), (torch.tensor([[1], [5]]),), dynamic_shapes=(rows,))
    graph = copy_graph_module(exported.module(check_guards=False)).graph
    output = graph.output_node()
    output.args = (output_value(graph),)
    return GraphModule(exported.module(check_guards=False), graph)


IDS = torch.tensor([[1], [10], [0], [7], [3]])


def test_a_graph_is_cut_at_what_is_not_known(layer):
    fused = fuse(layer)
    first, second = segments(fused)
    with torch.no_grad():
        torch.testing.assert_close(fused(IDS), layer(IDS), rtol=1e-5, atol=1e-5)
    assert runs_native(first)
    assert runs_native(second)


def test_neither_rows_nor_threads_change_a_bit(layer):
    fused, before = fuse(layer), torch.get_num_threads()
    with torch.no_grad():
        whole = fused(IDS)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert all(torch.equal(fused(IDS[row : row + 1])[0], whole[row]) for row in range(len(IDS)))
    torch.set_num_threads(before)


def test_many_tokens_are_pytorchs(layer):
    ids, fused = torch.arange(17)[:, None] % 11, fuse(layer)
    with torch.no_grad():
        assert torch.equal(fused(ids), layer(ids))
    assert "17 tokens; expected 1 to 16" in segments(fused)[0].reason


def test_gradients_are_pytorchs(layer):
    fused = fuse(layer)
    fused(IDS).sum().backward()
    got = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    layer(IDS).sum().backward()
    for mine, parameter in zip(got, layer.parameters()):
        torch.testing.assert_close(mine, parameter.grad)
    layer.zero_grad()


def test_weights_that_change_are_the_users_own(layer):
    """In place, moved, and of another dtype."""
    fused, weight = fuse(layer), layer.get_parameter("wide.weight")
    kept = weight.data
    with torch.no_grad():
        before = fused(IDS)
        weight.data = 2 * kept
        assert not torch.equal(fused(IDS), before)
        torch.testing.assert_close(fused(IDS), layer(IDS), rtol=1e-5, atol=1e-5)
        for dtype in (torch.float64, torch.bfloat16):
            layer.to(dtype)
            got = fused(IDS)
            assert got.dtype == dtype
            assert torch.equal(got, layer(IDS))
        layer.float()
        weight.data = kept


def test_an_index_outside_of_an_embedding_is_refused(layer):
    for wrong in (-1, 11):
        with torch.no_grad(), pytest.raises(IndexError, match="an index lies outside of the embedding"):
            fuse(layer)(torch.tensor([[1], [wrong]]))


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=41,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=300,
    )
    return LlamaForCausalLM(config).eval()


def test_a_decode_step_is_one_call(monkeypatch):
    """With what the passes make of a model."""
    steps = []

    def as_one(kernels, dtype, module, anew):
        if kernels == "torch":
            return as_step(kernels, dtype, module, anew)
        steps.append(whole(module))
        return steps[-1]

    def as_several(kernels, dtype, module):
        def another():
            steps.append(made.another())
            return steps[-1]

        made = as_turns(kernels, dtype, module) if kernels == "torch" else whole(module)
        return made if kernels == "torch" else another

    monkeypatch.setattr("semkv.compiled.as_step", as_one)
    monkeypatch.setattr("semkv.compiled.as_turns", as_several)
    compiled = semkv.compile(small_model(), config=semkv.CompileConfig(floor=0, kernels="cpp"))
    plain = compiled.with_method("full", config=semkv.CompileConfig(floor=0, kernels="torch"))
    ids = torch.randint(41, (2, 20), generator=torch.Generator().manual_seed(0))
    for rows in (1, 2):
        states = [one.prefill(ids[:rows]) for one in (compiled, plain)]
        for step in range(3):
            new = ids[:rows, step : step + 1]
            got, expected = (one.extend(state, new) for one, state in zip((compiled, plain), states))
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        calls = 1 if rows == 1 else 1 + rows * len(compiled.program.sites)  # of several rows, each layer's turn is one
        assert [step.reason for step in steps] == [None] * calls


def test_runs_between_attentions_are_calls():
    """Of a graph whose memory is no tensor, as for several tokens."""
    compiled = semkv.compile(small_model(), config=semkv.CompileConfig(floor=0, kernels="cpp"))
    decode = compiled._running.decode
    left = [node.target for node in decode.graph.nodes if node.op == "call_function"]
    assert left.count(mixed_attention) == 2
    assert {str(target) for target in left if isinstance(target, torch._ops.OpOverload)} <= {"aten.sym_size.int"}
    assert len(segments(decode)) == 3
