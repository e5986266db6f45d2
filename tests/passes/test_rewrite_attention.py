"""Stateful graphs: one call of the memory and one mixed attention per site; the numbers of the stateless model."""

from __future__ import annotations

import itertools

import pytest
import torch

from semkv.ir import memory
from semkv.ir.graph import attention_nodes
from semkv.ir.ops import mixed_attention
from semkv.ir.plain_memory import PlainMemory
from semkv.passes.assign_budgets import AssignBudgets
from semkv.passes.base import PassOptions
from semkv.passes.rewrite_attention import RewriteAttention
from semkv.passes.surprisal_head import SurprisalHead


def rewritten(program):
    for step in (SurprisalHead(), AssignBudgets(), RewriteAttention()):
        program = step.run(program, PassOptions())
    return program


@pytest.fixture
def lowered(decoder_program):
    return rewritten(decoder_program)


def count(module, target) -> int:
    return sum(node.target == target for node in module.graph.nodes)


def run_in_pieces(program, ids, positions, cuts):
    """Prefill up to the first cut, extend up to the last, then one token at a time; logits of all tokens."""
    state = PlainMemory(program.sites)
    hidden = [program.prefill(ids[:, : cuts[0]], positions[:, : cuts[0]], state)]
    for start, stop in itertools.pairwise(cuts):
        hidden.append(program.extend(ids[:, start:stop], positions[:, start:stop], state))
    for t in range(cuts[-1], ids.shape[1]):
        hidden.append(program.decode(ids[:, t : t + 1], positions[:, t : t + 1], state))
    return program.head(torch.cat(hidden, 1))


def test_operator_counts(lowered):
    assert len(attention_nodes(lowered.body.graph)) == 3
    for module in (lowered.prefill, lowered.extend, lowered.decode):
        assert not attention_nodes(module.graph)
        assert count(module, mixed_attention) == 3
    assert count(lowered.prefill, memory.record) == 3
    assert count(lowered.prefill, memory.entries) == 0
    assert count(lowered.decode, memory.entries) == 3
    assert count(lowered.decode, memory.record) == 0


def test_settings_of_sites_survive(lowered):
    reads = [node for node in lowered.decode.graph.nodes if node.target == mixed_attention]
    assert [node.kwargs.get("window", 0) for node in reads] == [0, 8, 0]
    assert all(node.kwargs["scale"] == lowered.sites[0].scale for node in reads)
    fresh = [n.kwargs["fresh"] for n in lowered.prefill.graph.nodes if n.target == mixed_attention]
    assert fresh == [True, True, True]


def test_a_model_without_sites_is_left_as_it_is(make_found):
    class Bag(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lm_head = torch.nn.Embedding(13, 8), torch.nn.Linear(8, 13)

        def forward(self, input_ids, positions):
            return self.lm_head(self.embed(input_ids))

    program = rewritten(make_found(Bag(), vocab_size=13))
    assert count(program.decode, mixed_attention) == 0
    assert [str(n.target) for n in program.decode.graph.nodes if n.op == "call_function"] == [
        str(n.target) for n in program.body.graph.nodes if n.op == "call_function"
    ]


@pytest.mark.parametrize("cuts", [(23,), (1,), (7, 9, 20), (15, 23)])
def test_pieces_equal_the_whole(lowered, decoder, cuts):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 61, (2, 23), generator=generator)
    positions = torch.arange(23).expand(2, 23).contiguous()
    with torch.no_grad():
        logits = run_in_pieces(lowered, ids, positions, cuts)
        torch.testing.assert_close(logits, decoder(ids, positions), rtol=1e-12, atol=1e-12)


def test_rows_at_their_own_positions(lowered, decoder):
    """Two rows whose prompts have different lengths are decoded in one call."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 61, (2, 12), generator=generator)
    states = [PlainMemory(lowered.sites), PlainMemory(lowered.sites)]
    lengths = (11, 6)
    with torch.no_grad():
        for row, (state, length) in enumerate(zip(states, lengths)):
            lowered.prefill(ids[row : row + 1, :length], torch.arange(length)[None], state)
        together = Side(states)
        step = torch.stack([ids[row, length : length + 1] for row, length in enumerate(lengths)])
        logits = lowered.head(lowered.decode(step, torch.tensor(lengths)[:, None], together))
        for row, length in enumerate(lengths):
            alone = decoder(ids[row : row + 1, : length + 1], torch.arange(length + 1)[None])[:, -1]
            torch.testing.assert_close(logits[row : row + 1, 0], alone, rtol=1e-12, atol=1e-12)


class Side(PlainMemory):
    """Memories of single rows side by side, each row's entries a block of its own."""

    def __init__(self, states):
        self.states = states

    def entries(self, site, q, k, v, positions):
        rows = [s.entries(site, *(x[i : i + 1] for x in (q, k, v, positions))) for i, s in enumerate(self.states)]
        blocks = ([block for row in rows for block in row[field]] for field in range(3))
        return memory.Entries(*blocks, block_heads=[i * k.shape[1] for i in range(len(rows))])


def test_parameters_are_shared_with_the_model(lowered, decoder):
    own = {parameter.data_ptr() for parameter in decoder.parameters()}
    for module in (lowered.body, lowered.prefill, lowered.extend, lowered.decode, lowered.head):
        assert {parameter.data_ptr() for parameter in module.parameters()} <= own


def test_dropping_tokens_changes_the_result(lowered, decoder):
    """The control: were attention not read from the memory, nothing above could fail."""
    ids = torch.arange(20)[None] % 61
    positions = torch.arange(20)[None]
    state = PlainMemory(lowered.sites, keep=lambda p: p[0] % 2 == 0)
    with torch.no_grad():
        lowered.prefill(ids[:, :19], positions[:, :19], state)
        logits = lowered.head(lowered.decode(ids[:, 19:], positions[:, 19:], state))
        assert float((logits - decoder(ids, positions)[:, -1:]).abs().max()) > 1e-4
