"""The specs of stages refuse what a broken pass would leave, and say what was expected."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from semkv.errors import SpecError
from semkv.ir import memory, spec
from semkv.ir.graph import attention_nodes, copy_graph_module
from semkv.ir.ops import mixed_attention
from semkv.passes.assign_budgets import AssignBudgets
from semkv.passes.base import PassOptions
from semkv.passes.rewrite_attention import RewriteAttention
from semkv.passes.surprisal_head import SurprisalHead

aten = torch.ops.aten


@pytest.fixture
def found(decoder_program):
    return decoder_program


@pytest.fixture
def annotated(found):
    options = PassOptions(method="sekv")
    return AssignBudgets().run(SurprisalHead().run(found, options), options)


@pytest.fixture
def lowered(annotated):
    return RewriteAttention().run(annotated, PassOptions(method="sekv"))


def edited(program, field="body"):
    """The program with its own copy of one graph, and that graph."""
    module = copy_graph_module(getattr(program, field))
    return program.evolve(**{field: module}), module.graph


def test_good_programs_pass(found, annotated, lowered):
    for program in (found, annotated, lowered):
        spec.check(program)


def test_unknown_stage(found):
    with pytest.raises(SpecError, match="stage 'half' is not one of captured, found, annotated, lowered"):
        spec.check(found.evolve(stage="half"))


def test_captured_has_no_sites(found):
    with pytest.raises(SpecError, match="3 sites before find_attention has run"):
        spec.check(found.evolve(stage="captured"))


def test_call_module_is_refused(found):
    program, graph = edited(found)
    program.body.add_module("extra", torch.nn.Identity())
    first = attention_nodes(graph)[0]
    with graph.inserting_before(first):
        graph.call_module("extra", (first.args[0],))
    with pytest.raises(SpecError, match="is a call_module node; expected call_function or get_attr"):
        spec.check(program)


def test_python_function_is_refused(found):
    program, graph = edited(found)
    first = attention_nodes(graph)[0]
    with graph.inserting_before(first):
        graph.call_function(len, (first.args[0],))
    with pytest.raises(SpecError, match="is not legal here; expected ATen, size arithmetic or semkv operators"):
        spec.check(program)


def test_unknown_attribute_is_named(found):
    program, graph = edited(found)
    with graph.inserting_before(attention_nodes(graph)[0]):
        graph.create_node("get_attr", "layers.9.weight")
    with pytest.raises(SpecError, match=r"reads 'layers\.9\.weight', which the module does not have"):
        spec.check(program)


def test_guards_are_refused_after_canonicalise(found):
    program, graph = edited(found)
    first = attention_nodes(graph)[0]
    with graph.inserting_before(first):
        graph.call_function(aten._assert_async.default, (first.args[0],))
    with pytest.raises(SpecError, match="is a guard; canonicalise removes them"):
        spec.check(program)


def test_placeholders_are_fixed(found):
    program, graph = edited(found)
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("attention_mask")
    with pytest.raises(SpecError, match=r"expected \('input_ids', 'positions'\)"):
        spec.check(program)


def test_sites_match_nodes(found):
    with pytest.raises(SpecError, match=r"nodes have sites \[0, 1, 2\], expected \[0, 1\]"):
        spec.check(found.evolve(sites=found.sites[:2]))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kv_heads": 4}, r"k has shape .* expected \[B, 4, T, 8\] for site 0"),
        ({"value_dim": 16}, r"v has shape .* expected \[B, 2, T, 16\] for site 0"),
        ({"scale": 1.0}, "scale=0.35.*, site 0 has 1.0"),
        ({"window": 5}, "window=0, site 0 has 5"),
        ({"has_sinks": True}, "sinks=None but site 0 has has_sinks=True"),
        ({"has_bias": True}, "bias=False but site 0 has has_bias=True"),
        ({"kv_heads": 3}, "4 query heads are no multiple of 3 KV heads"),
    ],
)
def test_sites_describe_their_nodes(found, change, text):
    sites = (replace(found.sites[0], **change), *found.sites[1:])
    with pytest.raises(SpecError, match=text):
        spec.check(found.evolve(sites=sites))


def test_annotated_needs_head_reasons_and_shares(annotated):
    with pytest.raises(SpecError, match="head: missing; surprisal_head must run"):
        spec.check(annotated.evolve(head=None))
    silent = tuple(replace(site, reason="") for site in annotated.sites)
    with pytest.raises(SpecError, match="no reason for its treatment"):
        spec.check(annotated.evolve(sites=silent))
    greedy = tuple(replace(s, budget_share=0.9) if s.treatment == "method" else s for s in annotated.sites)
    with pytest.raises(SpecError, match=r"shares of the 2 method stores sum to 1\.8"):
        spec.check(annotated.evolve(sites=greedy))


def test_lowered_has_no_stateless_attention_left(lowered):
    with pytest.raises(SpecError, match=r"semkv.attention.default .* is not legal here"):
        spec.check(lowered.evolve(decode=lowered.body))


def test_lowered_reads_each_site_once(lowered):
    program, graph = edited(lowered, "decode")
    read = next(node for node in graph.nodes if node.target == mixed_attention)
    read.replace_all_uses_with(read.args[0])
    graph.erase_node(read)
    with pytest.raises(SpecError, match="decode: 2 semkv::mixed_attention nodes for 3 sites"):
        spec.check(program)


def test_lowered_writes_each_site_once(lowered):
    program, graph = edited(lowered, "prefill")
    write = next(node for node in graph.nodes if node.target is memory.record)
    graph.erase_node(write)
    with pytest.raises(SpecError, match=r"prefill: record is called for sites \[1, 2\], expected \[0, 1, 2\]"):
        spec.check(program)


def test_missing_graph_is_named(lowered):
    with pytest.raises(SpecError, match="extend: missing at stage lowered"):
        spec.check(lowered.evolve(extend=None))


def test_copied_weights_are_refused(lowered):
    program, graph = edited(lowered, "decode")
    name = next(str(node.target) for node in graph.nodes if node.op == "get_attr")
    setattr(program.decode, name, torch.nn.Parameter(getattr(program.decode, name).detach().clone()))
    with pytest.raises(SpecError, match=f"decode: {name} is a copy of the body's tensor, expected shared storage"):
        spec.check(program)


def test_all_violations_are_listed(found):
    sites = (replace(found.sites[0], scale=1.0), replace(found.sites[1], window=3), found.sites[2])
    with pytest.raises(SpecError) as caught:
        spec.check(found.evolve(sites=sites))
    assert "site 0 has 1.0" in str(caught.value)
    assert "site 1 has 3" in str(caught.value)
