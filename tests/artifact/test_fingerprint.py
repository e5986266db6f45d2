"""Fingerprints tell models and programs apart, and agree where they should."""

from __future__ import annotations

import copy

import torch
from torch import nn

from semkv.artifact.fingerprint import (
    _places,
    model_fingerprint,
    program_fingerprint,
    program_weights,
    weights_digest,
)
from semkv.ir.graph import copy_graph_module


def test_model_and_program_agree_on_weights(decoder):
    program, root = decoder
    assert model_fingerprint(root) == weights_digest(program_weights(program)) == model_fingerprint(copy.deepcopy(root))


def test_tied_names_count_once_and_casts_agree():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    untied = copy.deepcopy(model)
    untied[1].weight = nn.Parameter(untied[0].weight.detach().clone())
    assert model_fingerprint(model) != model_fingerprint(untied)
    digest = model_fingerprint(model)
    assert model_fingerprint(copy.deepcopy(model).double()) == digest
    assert model_fingerprint(copy.deepcopy(model).bfloat16()) == digest


def test_one_training_step_a_rename_or_a_shape_changes_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300))
    digest = model_fingerprint(model)
    trained = copy.deepcopy(model)
    with torch.no_grad():
        trained[0].weight.add_(0.01 * torch.randn_like(trained[0].weight))
    assert model_fingerprint(trained) != digest
    assert model_fingerprint(nn.ModuleDict({"a": model[0]})) != digest
    assert weights_digest({"w": torch.zeros(4, 2)}) != weights_digest({"w": torch.zeros(2, 4)})


def test_samples_cover_rows_and_columns_of_large_tensors():
    rows, columns = torch.unravel_index(_places(4096 * 4096), (4096, 4096))
    assert rows.unique().numel() > 2500
    assert columns.unique().numel() > 2000
    assert _places(2**33).max() < 2**33


def test_program_fingerprint_sees_graphs_sites_and_weights_but_not_names(program):
    digest = program_fingerprint(program)
    assert program_fingerprint(program.evolve("another note")) == digest
    assert program_fingerprint(program.evolve(max_positions=65)) != digest
    assert program_fingerprint(program.evolve(extend=program.prefill)) != digest
    renamed = copy_graph_module(program.body)
    for node in renamed.graph.nodes:
        if node.op == "call_function":
            node.name = f"renamed_{node.name}"
    assert program_fingerprint(program.evolve(body=renamed)) == digest
    with torch.no_grad():
        program.body.get_parameter("layers.1.q.weight").mul_(1.1)
    assert program_fingerprint(program) != digest
