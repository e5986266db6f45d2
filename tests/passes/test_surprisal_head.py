"""The vocabulary projection and what follows it become the head; the body returns hidden states."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from semkv.ir import spec
from semkv.ir.graph import output_value, shape_of
from semkv.passes.base import PassOptions
from semkv.passes.surprisal_head import SurprisalHead

aten = torch.ops.aten
VOCAB, HIDDEN = 29, 16


class Plain(nn.Module):
    """No attention: only what follows the hidden states matters here."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.up = nn.Linear(HIDDEN, HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def hidden(self, input_ids):
        return torch.tanh(self.up(self.embed(input_ids)))

    def forward(self, input_ids, positions):
        return self.lm_head(self.hidden(input_ids))


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head.weight = self.embed.weight


class SoftCap(Plain):
    """Scaled, soft-capped and cast, as Gemma does."""

    def forward(self, input_ids, positions):
        return (torch.tanh(self.lm_head(self.hidden(input_ids)) / 5.0) * 5.0).float()


class PaddedVocabulary(Plain):
    """A projection wider than the vocabulary, cut afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(HIDDEN, 32)

    def forward(self, input_ids, positions):
        return self.lm_head(self.hidden(input_ids))[..., :VOCAB]


class Matmul(Plain):
    def forward(self, input_ids, positions):
        return self.hidden(input_ids) @ self.embed.weight.T + self.up.bias.sum()


class Shifted(Plain):
    """Mixes positions after the projection: must stay whole."""

    def forward(self, input_ids, positions):
        logits = self.lm_head(self.hidden(input_ids))
        return logits + logits.roll(1, dims=1)


class PositionScale(Plain):
    """Reads the positions after the projection: must stay whole."""

    def forward(self, input_ids, positions):
        return self.lm_head(self.hidden(input_ids)) * positions.unsqueeze(-1)


class NoProjection(Plain):
    """The last linear is no projection to the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)

    def forward(self, input_ids, positions):
        return torch.nn.functional.pad(self.hidden(input_ids), (0, VOCAB - HIDDEN))


def split(make_found, module_class):
    module = module_class().double().eval()
    return module, SurprisalHead().run(make_found(module, vocab_size=VOCAB), PassOptions())


def count(module, target) -> int:
    return sum(node.target == target for node in module.graph.nodes)


IDS = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(7).expand(2, 7).contiguous()


@pytest.mark.parametrize("module_class", [Plain, Tied, SoftCap, PaddedVocabulary, Matmul])
def test_split_is_exact_at_any_rank(make_found, module_class):
    module, program = split(make_found, module_class)
    spec.check(program)
    with torch.no_grad():
        hidden, expected = program.body(IDS, POSITIONS), module(IDS, POSITIONS)
        assert hidden.shape == (2, 7, HIDDEN)
        assert torch.equal(program.head(hidden), expected)
        assert program.head(hidden).dtype == expected.dtype
        torch.testing.assert_close(program.head(hidden[:, -1]), expected[:, -1])
        torch.testing.assert_close(program.head(hidden[0, 3]), expected[0, 3])


def test_operator_counts(make_found):
    _module, program = split(make_found, SoftCap)
    assert count(program.body, aten.linear.default) == 1
    assert count(program.head, aten.linear.default) == 1
    assert count(program.head, aten.tanh.default) == 1
    assert shape_of(output_value(program.body.graph))[-1] == HIDDEN
    assert "split at aten.linear.default" in program.notes[-1]


@pytest.mark.parametrize(
    ("module_class", "reason"),
    [
        (Shifted, "positions are mixed or reshaped after it"),
        (PositionScale, "positions are mixed or reshaped after it"),
        (NoProjection, "no projection to the vocabulary"),
    ],
)
def test_what_cannot_be_split_stays_whole(make_found, module_class, reason):
    module, program = split(make_found, module_class)
    spec.check(program)
    assert f"not split ({reason})" in program.notes[-1]
    with torch.no_grad():
        logits = program.body(IDS, POSITIONS)
        assert torch.equal(logits, module(IDS, POSITIONS))
        assert torch.equal(program.head(logits), logits)


def test_tied_weights_stay_one_tensor(make_found):
    module, program = split(make_found, Tied)
    owned = {p.data_ptr() for p in program.head.parameters()}
    assert owned == {module.embed.weight.data_ptr()}


def test_runs_once(make_found):
    _module, program = split(make_found, Plain)
    assert not SurprisalHead().applies(program, PassOptions())
