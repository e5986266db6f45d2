"""Programs of the processes that share a model: run side by side, they compute what the whole one does."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import semkv
from benchmarks.lib.tiny_models import tiny_model
from semkv.compiler.pipeline import among_ranks, captured_program
from semkv.ir.ranks import Ranks, collectives
from semkv.loading import load_compiled
from semkv.passes.shapes import with_shapes
from semkv.passes.shard_heads import Cut, heads_of, weights_of

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "pad_token_id": 0,
}
"""Odd where they may be: no process count divides vocabulary and channels."""

FAMILIES = {
    "grouped": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True, mlp_bias=True)
    ),
    "one KV head": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1)),
    "three KV heads": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=3)),
    "fused, Conv1D": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=101, n_embd=48, n_layer=2, n_head=6, n_positions=256)
    ),
    "fused, interleaved": lambda: FalconForCausalLM(
        FalconConfig(
            vocab_size=101,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=6,
            new_decoder_architecture=True,
            num_kv_heads=2,
        )
    ),
    "fused, tied": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)),
    "norm per head": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8)),
    "norm over heads": lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES, num_key_value_heads=2)),
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=3)),
}
WHOLE = {
    "one KV head": ("q_proj", "k_proj", "v_proj"),
    "experts": ("gate",),
    "fused, interleaved": ("query_key_value",),
}
"""Weights that a process may have whole: those of a shared KV head, routers, and heads that lie in groups which a process has a part of."""

OF_SHARED = {"norm over heads": ("q_proj", "k_proj")}
"""Those besides where processes share KV heads: a norm over all heads needs them all."""


class Together:
    """What processes exchange, between threads."""

    def __init__(self, size: int) -> None:
        self.barrier, self.held = threading.Barrier(size, timeout=60), [torch.empty(0)] * size

    def sum(self, rank: int, x: Tensor) -> Tensor:
        self.held[rank] = x
        self.barrier.wait()
        result = sum(self.held[1:], self.held[0])
        self.barrier.wait()
        return result


class Run(Interpreter):
    def __init__(self, module, rank: int, together: Together | None) -> None:
        super().__init__(module)
        self.rank, self.together = rank, together

    def call_function(self, target, args, kwargs):
        if target == collectives.all_reduce.default:
            return args[0] if self.together is None else self.together.sum(self.rank, args[0])
        if target == collectives.wait_tensor.default:
            return args[0]
        return super().call_function(target, args, kwargs)


def logits(programs, *, exchange: bool = True) -> list[Tensor]:
    ids = torch.randint(1, 101, (2, 23), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(23).expand(2, -1).contiguous()
    together = Together(len(programs)) if exchange else None
    found: list = [None] * len(programs)

    def one(rank: int) -> None:
        with torch.no_grad():
            hidden = Run(programs[rank].body, rank, together).run(ids, positions)
            found[rank] = Run(programs[rank].head, rank, together).run(hidden)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def captured(name: str):
    torch.manual_seed(0)
    return captured_program(FAMILIES[name]().to(torch.float64).eval())


@pytest.mark.parametrize("name", FAMILIES)
def test_programs_of_processes_compute_what_the_whole_one_does(name):
    whole = captured(name)
    (expected,) = logits([whole])
    for size in (2, 3):
        programs = [among_ranks(whole, Ranks(rank, size, "none")) for rank in range(size)]
        for found in logits(programs):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        counts = [[site.kv_heads for site in program.sites] for program in programs]
        heads = whole.sites[0].kv_heads
        assert [sum(column) for column in zip(*counts)] == [max(heads, size)] * 2
        for program in programs:
            shared = {key for key, x in weights_of(program).items() if x.dim() > 1 and x is weights_of(whole).get(key)}
            known = (*WHOLE.get(name, ()), *(OF_SHARED.get(name, ()) if heads < size else ()), "wpe")
            strange = [key for key in shared if not any(part in key for part in known)]
            assert not strange, f"in every process: {strange}"
            assert all(key in program.notes[-1] or "more" in program.notes[-1] for key in shared)


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_may_be_any_that_make_processes_hold_as_much(name):
    whole = captured(name)
    (expected,) = logits([whole])
    heads = whole.sites[0].kv_heads
    nbytes = {
        site.store: tuple(float(10 * (head == site.store) + head) for head in range(heads)) for site in whole.sites
    }
    programs = [among_ranks(whole, Ranks(rank, 2, "none"), nbytes) for rank in range(2)]
    for found in logits(programs):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    if heads > 1:
        for parts in zip(*(program.sites for program in programs)):
            assert sorted(head for site in parts for head in site.head_order) == list(range(heads))
            assert parts[0].among.parts == tuple(site.among.kv for site in parts)
        held = [
            sum(nbytes[site.store][head] for site in program.sites for head in site.head_order) for program in programs
        ]
        assert max(held) - min(held) <= 2 + (heads % 2) * 10, "the larger heads of layers are apart"


def test_without_the_exchange_the_numbers_are_others():
    whole = captured("grouped")
    (expected,) = logits([whole])
    programs = [among_ranks(whole, Ranks(rank, 2, "none")) for rank in range(2)]
    assert all((found - expected).abs().max() > 0.01 for found in logits(programs, exchange=False))


def test_a_shared_head_has_its_queries_in_parts():
    site = captured("one KV head").sites[0]
    found = [heads_of(site, Ranks(rank, 4, "none")) for rank in range(4)]
    assert [heads.kv for heads in found] == [(0,)] * 4
    assert [heads.query for heads in found] == [tuple(range(6))] * 4, "the whole group votes in every process"
    assert sorted(sum((heads.own for heads in found), ())) == list(range(6)), "each output is added once"


def test_sites_know_the_heads_of_the_model():
    program = among_ranks(captured("three KV heads"), Ranks(1, 2, "none"))
    site = program.sites[0]
    assert (site.kv_heads, site.head_order, site.among.query) == (2, (1, 2), (2, 3, 4, 5))
    assert site.once == 2 / 3


def test_what_nothing_reads_is_found_in_long_programs():
    """A graph of more operations than Python has calls."""
    graph = Graph()
    live = x = graph.placeholder("x")
    unread = []
    for _ in range(2000):
        live = graph.call_function(torch.ops.aten.neg.default, (live,))
        unread.append(graph.call_function(torch.ops.aten.neg.default, (unread[-1] if unread else x,)))
    graph.output(live)
    cut = Cut(GraphModule(torch.nn.Module(), graph), Ranks(0, 2, "none"))
    assert cut.dead == set(unread)
    live.replace_all_uses_with(x)
    cut.names["live"] = "x"
    assert len(cut.dead) == 4000


def test_a_process_alone_has_the_program_itself():
    whole = captured("grouped")
    assert among_ranks(whole, Ranks(0, 1, "none")) is whole


def test_a_norm_whose_output_is_joined_is_said():
    """An output that no product over heads alone reads is joined: every process makes the rest of it."""
    from torch import nn

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qkv = nn.Embedding(101, 32), nn.Linear(32, 96)
            self.norm, self.out, self.head = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 101)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            return self.head(x + self.out(self.norm(y)))

    torch.manual_seed(0)
    whole = captured_program(Joined().to(torch.float64).eval())
    programs = [among_ranks(whole, Ranks(rank, 2, "none")) for rank in range(2)]
    for found in logits(programs):
        torch.testing.assert_close(found, logits([whole])[0], rtol=1e-9, atol=1e-9)
    assert "is joined" in programs[0].notes[-1]
    assert "out.weight" in programs[0].notes[-1]


@pytest.mark.parametrize("name", ["experts", "recurrent", pytest.param("complex", marks=pytest.mark.slow)])
def test_shapes_are_found_anew(name):
    """Bodies of recurrent layers are for certain numbers of tokens, and some operators fix them: the shapes are for any."""
    tiny = {"recurrent": "lfm2", "complex": "llama4"}
    whole = captured(name) if name in FAMILIES else captured_program(tiny_model(tiny[name], dtype=torch.float64))
    bare = whole.evolve(body=_without_values(whole.body), head=_without_values(whole.head))
    program = among_ranks(with_shapes(bare), Ranks(0, 2, "none"))
    other = among_ranks(with_shapes(bare), Ranks(1, 2, "none"))
    for found in logits([program, other]):
        torch.testing.assert_close(found, logits([whole])[0], rtol=1e-6, atol=1e-6)


def test_an_artifact_is_cut_as_the_model_is(tmp_path):
    """Its projections stream their weights already."""
    torch.manual_seed(0)
    model = FAMILIES["three KV heads"]().eval()
    semkv.compile(model, method="full").save(tmp_path / "model")
    ranks = Ranks(1, 2, "none")
    (note,) = (x for x in load_compiled(tmp_path / "model", ranks=ranks).program.notes if x.startswith("shard_heads"))
    assert note == among_ranks(captured_program(model), ranks).notes[-1]


def _without_values(module):
    from semkv.ir.graph import copy_graph_module

    copied = copy_graph_module(module)
    for node in copied.graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if key != "val"}
    return copied
