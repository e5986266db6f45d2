"""A tiny decoder lowered by the real passes, and the program and artifact made of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from transformers import LlamaConfig, LlamaForCausalLM

import semkv
from semkv.artifact.fingerprint import model_fingerprint
from semkv.ir.ops import attention
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.passes.base import PassOptions
from semkv.passes.rewrite_attention import RewriteAttention
from semkv.profiles.schema import ModelFacts, Profile, ProfileInfo, SekvSection, SiteFacts

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM = 29, 16, 4, 2, 8


class Weights(nn.Module):
    """Parameters of a decoder of two layers; the output matrix is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList()
        for _ in range(2):
            layer = nn.Module()
            layer.q = nn.Linear(HIDDEN, HEADS * DIM, bias=False)
            layer.k = nn.Linear(HIDDEN, KV_HEADS * DIM, bias=False)
            layer.v = nn.Linear(HIDDEN, KV_HEADS * DIM, bias=False)
            layer.o = nn.Linear(HEADS * DIM, HIDDEN)
            self.layers.append(layer)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.lm_head.weight = self.embed.weight


def make_program(seed: int = 0) -> tuple[Program, Weights]:
    """A lowered program with two sites, and the module whose weights it shares."""
    torch.manual_seed(seed)
    root = Weights().eval().requires_grad_(False)
    aten = torch.ops.aten
    graph = Graph()
    ids, positions = graph.placeholder("input_ids"), graph.placeholder("positions")
    rows = graph.call_function(aten.sym_size.int, (ids, 0))
    tokens = graph.call_function(aten.sym_size.int, (ids, 1))
    x = graph.call_function(aten.embedding.default, (graph.get_attr("embed.weight"), ids))
    for index in range(2):
        path = f"layers.{index}"

        def heads(name: str, count: int, x: Node = x, path: str = path) -> Node:
            flat = graph.call_function(aten.linear.default, (x, graph.get_attr(f"{path}.{name}.weight")))
            split = graph.call_function(aten.view.default, (flat, [rows, tokens, count, DIM]))
            return graph.call_function(aten.transpose.int, (split, 1, 2))

        q, k, v = heads("q", HEADS), heads("k", KV_HEADS), heads("v", KV_HEADS)
        settings = {"site": index, "scale": 1 / math.sqrt(DIM), "softcap": 0.0, "window": 0}
        mixed = graph.call_function(attention, (q, k, v, positions), settings)
        merged = graph.call_function(aten.transpose.int, (mixed, 1, 2))
        flat = graph.call_function(aten.reshape.default, (merged, [rows, tokens, HEADS * DIM]))
        weight, bias = graph.get_attr(f"{path}.o.weight"), graph.get_attr(f"{path}.o.bias")
        x = graph.call_function(aten.add.Tensor, (x, graph.call_function(aten.linear.default, (flat, weight, bias))))
    graph.output(x)
    head = Graph()
    logits = head.call_function(aten.linear.default, (head.placeholder("hidden"), head.get_attr("lm_head.weight")))
    head.output(logits)
    sites = tuple(
        AttentionSite(
            i, f"layers.{i}", i, HEADS, KV_HEADS, DIM, DIM, 1 / math.sqrt(DIM), reason="found", budget_share=0.5
        )
        for i in range(2)
    )
    program = Program(
        stage="annotated",
        body=GraphModule(root, graph),
        head=GraphModule(root, head),
        sites=sites,
        vocab_size=VOCAB,
        max_positions=64,
        dtype=torch.float32,
        notes=("made by hand",),
    )
    return RewriteAttention().run(program, PassOptions()), root


def run(program: Program, ids: Tensor, memory: object) -> Tensor:
    """Logits of a prefill of all but the last four tokens, and of four decode steps, [B, T, vocab]."""
    positions = torch.arange(ids.shape[1]).expand(ids.shape).contiguous()
    split = ids.shape[1] - 4
    hidden = [program.prefill(ids[:, :split], positions[:, :split], memory)]
    for step in range(split, ids.shape[1]):
        hidden.append(program.decode(ids[:, step : step + 1], positions[:, step : step + 1], memory))
    return program.head(torch.cat(hidden, 1))


@pytest.fixture
def decoder() -> tuple[Program, nn.Module]:
    """A lowered program and the module whose weights it shares."""
    return make_program()


@pytest.fixture
def program(decoder) -> Program:
    return decoder[0]


@pytest.fixture(scope="session")
def other_program() -> Program:
    """A program of the same shape with other weights."""
    return make_program(seed=1)[0]


@pytest.fixture(scope="session")
def run_program() -> Callable[[Program, Tensor, object], Tensor]:
    return run


BUDGETS = {"full": None, "sekv": 0.6}


@pytest.fixture(scope="session")
def prompt() -> Tensor:
    """Ids [2, 150], long enough that `sekv` folds spans at its budget."""
    return torch.arange(3, 3 + 2 * 150).reshape(2, 150) * 7 % 97


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def profile(model) -> Profile:
    """An untrained profile of the model: what `sekv` needs, drawn at random."""
    sites = tuple(
        SiteFacts(index=i, name=f"layers.{i}", store=i, q_heads=4, kv_heads=2, key_dim=8, value_dim=8) for i in range(2)
    )
    info = ProfileInfo(
        fingerprint=model_fingerprint(model),
        model=ModelFacts(name="tiny", dtype="float32", vocab_size=97, max_positions=512, sites=sites),
        sekv=SekvSection(routing_dims=(4, 4), max_rank=4, gate_hidden=8, gate_summary_dim=4, trained=False),
    )
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in info.tensor_shapes().items()}
    return Profile(info, tensors)


@pytest.fixture(scope="session")
def compiled(model, profile):
    """The model compiled once per method, by method."""
    return {
        name: semkv.compile(
            model, profile if name == "sekv" else None, method=name, budget=budget, config=semkv.CompileConfig(floor=0)
        )
        for name, budget in BUDGETS.items()
    }


@pytest.fixture(scope="session")
def saved(compiled, prompt, tmp_path_factory):
    """A folder with an artifact and a state of each."""
    folder = tmp_path_factory.mktemp("saved")
    for name, one in compiled.items():
        one.save(folder / f"{name}.semkv")
        one.prefill(prompt).save(folder / f"{name}.state")
    return folder
