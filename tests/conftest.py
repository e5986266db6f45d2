"""Fixtures that several folders of tests use."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import semkv.kernels
from semkv.api import compile as compile_model
from semkv.compiled import CompiledModel
from semkv.config import CompileConfig
from semkv.ir.graph import attention_nodes
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.profiles.calibration import (
    STEPS,
    CalibrationData,
    Job,
    MeasureData,
    run_steps,
)
from semkv.profiles.calibration.needles import NeedleQuestion, NeedleTest
from semkv.profiles.calibration.samples import SampleSet

ROOT = Path(__file__).parents[1]


def make_importable(name: str) -> None:
    """A package of the tree, and it alone: the tree itself on the path would bring the package's folders with it."""
    folder = ROOT / name
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


make_importable("benchmarks")

from benchmarks.lib.tiny_profiles import MEASURING, TRAINING, words  # noqa: E402

SLOW = ROOT / "tests" / "slow.txt"


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that tests/slow.txt names run with the slow ones: each takes seconds, and none is the only one of what it tests."""
    listed = set(SLOW.read_text(encoding="utf-8").split("\n")) - {""}
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)
    whole = [Path(one).resolve() for one in config.args] == [ROOT / "tests"]
    if whole and (unknown := listed - {item.nodeid for item in items}):
        raise pytest.UsageError(f"tests/slow.txt names tests that there are not: {', '.join(sorted(unknown))}")


def quick_ones(cases: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """Cases as parameters of a test, of which those that are not `quick` run with the slow tests."""
    made, chosen = list(cases), list(quick)
    assert all(one in made for one in chosen), "a case that there is not"
    return [pytest.param(one, marks=() if one in chosen else pytest.mark.slow, id=str(one)) for one in made]


def found_program(
    module: nn.Module,
    *,
    vocab_size: int,
    max_positions: int | None = None,
    dynamic_batch: bool = True,
    max_length: int = 4096,
) -> Program:
    """The found-stage program of a module that calls `torch.ops.semkv.attention` itself: no model library, no patterns.

    The module takes input_ids [B, T] and positions [B, T] and returns logits [B, T, vocab].
    """
    module.eval()
    ids = torch.arange(2 * 9).view(2, 9) % vocab_size
    positions = torch.arange(9).expand(2, 9).contiguous()
    length = torch.export.Dim("length", min=1, max=max_length)
    batch = torch.export.Dim("batch", min=1, max=64) if dynamic_batch else None
    if not dynamic_batch:
        ids, positions = ids[:1], positions[:1]
    shapes = {"input_ids": {0: batch, 1: length}, "positions": {0: batch, 1: length}}
    exported = torch.export.export(
        module, (ids, positions), dynamic_shapes=shapes, strict=False, prefer_deferred_runtime_asserts_over_guards=True
    )
    body = _with_attributes(exported, module)
    sites = tuple(_site(number, node) for number, node in enumerate(attention_nodes(body.graph)))
    return Program(
        stage="found",
        body=body,
        head=None,
        sites=sites,
        vocab_size=vocab_size,
        max_positions=max_positions,
        dtype=next(module.parameters()).dtype,
        batched=dynamic_batch,
    )


def _with_attributes(exported: torch.export.ExportedProgram, module: nn.Module) -> torch.fx.GraphModule:
    """The exported graph with parameters as `get_attr` nodes that share the module's tensors, without guards."""
    graph = torch.fx.Graph()
    signature = exported.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    root = nn.Module()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.target in names:
            name = names[node.target]
            tensor = exported.constants[name] if name in exported.constants else _lookup(module, name)
            flat = "p_" + name.replace(".", "_")
            root.register_parameter(flat, tensor) if isinstance(tensor, nn.Parameter) else root.register_buffer(
                flat, tensor
            )
            copied[node] = graph.get_attr(flat)
            copied[node].meta = dict(node.meta)
        elif node.op == "output":
            (value,) = node.args[0]
            graph.output(copied[value])
        elif "_assert" not in str(node.target):
            copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.eliminate_dead_code()
    return torch.fx.GraphModule(root, graph)


def _lookup(module: nn.Module, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)


def _site(number: int, node: torch.fx.Node) -> AttentionSite:
    q, k, v = (operand.meta["val"] for operand in node.args[:3])
    extra = [
        node.args[i] if len(node.args) > i else node.kwargs.get(name) for i, name in ((4, "sinks"), (5, "bias_slopes"))
    ]
    return AttentionSite(
        index=number,
        name=f"layers.{number}",
        store=number,
        q_heads=q.shape[1],
        kv_heads=k.shape[1],
        key_dim=k.shape[3],
        value_dim=v.shape[3],
        scale=node.kwargs["scale"],
        softcap=node.kwargs.get("softcap", 0.0),
        window=node.kwargs.get("window", 0),
        has_sinks=extra[0] is not None,
        has_bias=extra[1] is not None,
    )


class Layer(nn.Module):
    """A pre-norm decoder layer with rotary positions, grouped query heads and a semkv::attention call."""

    def __init__(self, site: int, hidden: int, heads: int, kv_heads: int, dim: int, window: int = 0) -> None:
        super().__init__()
        self.site, self.heads, self.kv_heads, self.dim, self.window = site, heads, kv_heads, dim, window
        self.norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q = nn.Linear(hidden, heads * dim)
        self.k = nn.Linear(hidden, kv_heads * dim)
        self.v = nn.Linear(hidden, kv_heads * dim)
        self.o = nn.Linear(heads * dim, hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        y = self.norm(x)
        q = rotate(self.q(y).view(rows, length, self.heads, self.dim).transpose(1, 2), positions)
        k = rotate(self.k(y).view(rows, length, self.kv_heads, self.dim).transpose(1, 2), positions)
        v = self.v(y).view(rows, length, self.kv_heads, self.dim).transpose(1, 2)
        scale = self.dim**-0.5
        out = torch.ops.semkv.attention(q, k, v, positions, site=self.site, scale=scale, window=self.window)
        x = x + self.o(out.transpose(1, 2).reshape(rows, length, -1))
        return x + self.down(torch.nn.functional.gelu(self.up(self.mlp_norm(x))))


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary positions in float32, interleaved halves; x [B, H, T, D], positions [B, T]."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[:, None, :, None].float() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Decoder(nn.Module):
    """A small decoder with attention in semkv's normal form: ids, positions [B, T] -> logits [B, T, vocab]."""

    def __init__(
        self, windows: tuple[int, ...] = (0, 8, 0), heads: int = 4, kv_heads: int = 2, vocab: int = 61, seed: int = 0
    ):
        super().__init__()
        torch.manual_seed(seed)
        hidden, dim = 32, 8
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(i, hidden, heads, kv_heads, dim, window) for i, window in enumerate(windows))
        self.norm = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, positions)
        return self.lm_head(self.norm(x))


@pytest.fixture(scope="session")
def make_found():
    """`make_found(module, vocab_size=...) -> Program` at stage found."""
    return found_program


@pytest.fixture(scope="session")
def decoder_class() -> type[Decoder]:
    """A small decoder in semkv's normal form."""
    return Decoder


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    """The small decoder in float64, in evaluation mode: three layers, the middle one with a window of 8."""
    return Decoder().double().eval()


@pytest.fixture(scope="session")
def decoder_program(decoder) -> Program:
    """The found-stage program of `decoder`; passes never change their input, so that tests may share it."""
    return found_program(decoder, vocab_size=61)


VOCABULARY = 60


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
        data = CalibrationData(
            (random_ids(TRAINING.length + 8, TRAINING.length),),
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
        measured = MeasureData(sets, needles, "random tokens", words(VOCABULARY))
        job = Job(model, "tiny", "", data, TRAINING, measured, MEASURING, latents)
        made = run_steps(job, STEPS, work=Path(tmp_path_factory.mktemp("profile")))
        assert not made.skipped, made.notes
        return compile_model(model, made.profile, method="full", config=CompileConfig(floor=0, latents=latents))

    return make


@pytest.fixture(scope="session")
def base() -> CompiledModel:
    """The bundled model as `full`, with its profile and no floor. Tests do not change it."""
    model, _ = semkv.bundled.load()
    return semkv.compile(model, semkv.bundled.profile(), method="full", config=semkv.CompileConfig(floor=0))


@pytest.fixture(scope="session")
def tiny_llama() -> LlamaForCausalLM:
    """The model of `tiny`. Its weights are so large that tokens depend on all of the prompt."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tiny(profiled, tiny_llama) -> CompiledModel:
    """The tiny model with a profile."""
    return profiled(tiny_llama)
