"""Positions that a model makes for itself become functions of the position input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from semkv.errors import CaptureError
from semkv.ir import spec
from semkv.ir.graph import placeholders
from semkv.ir.plain_memory import PlainMemory
from semkv.passes.assign_budgets import AssignBudgets
from semkv.passes.base import PassOptions
from semkv.passes.lift_positions import LiftPositions
from semkv.passes.rewrite_attention import RewriteAttention
from semkv.passes.surprisal_head import SurprisalHead

aten = torch.ops.aten
LIMIT = 40


class Model(nn.Module):
    """Embedding, one attention, projection; subclasses decide where positions come in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lm_head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.places = nn.Embedding(LIMIT + 2, 16)
        self.register_buffer("rows", torch.randn(LIMIT, 4))
        self.register_buffer("rows_for_heads", torch.randn(1, 1, LIMIT, 4))
        self.register_buffer("rows_before_heads", torch.randn(1, LIMIT, 1, 4))
        self.register_buffer("numbers", torch.arange(LIMIT)[None])

    def embedded(self, input_ids):
        return self.embed(input_ids)

    def turn(self, x, length):
        """What is done to queries and keys [B, H, T, D]."""
        return x

    def split(self, x):
        return x.view(*x.shape[:2], 4, 4).transpose(1, 2)

    def forward(self, input_ids, positions):
        x, length = self.embedded(input_ids), input_ids.shape[1]
        q, k, v = (
            self.turn(self.split(self.q(x)), length),
            self.turn(self.split(self.k(x)), length),
            self.split(self.v(x)),
        )
        out = torch.ops.semkv.attention(q, k, v, positions, site=0, scale=0.5)
        return self.lm_head(x + self.o(out.transpose(1, 2).reshape(x.shape)))


class Arange(Model):
    def embedded(self, input_ids):
        return self.embed(input_ids) + self.places(torch.arange(input_ids.shape[1]))


class ArangeWithOffset(Model):
    def embedded(self, input_ids):
        length = input_ids.shape[1]
        return self.embed(input_ids) + self.places(torch.arange(2, length + 2).unsqueeze(0))


class CumulativeSum(Model):
    """As OPT does: the mask of ones is summed, and two places are left out."""

    def embedded(self, input_ids):
        mask = torch.ones_like(input_ids)
        return self.embed(input_ids) + self.places((mask.cumsum(1) * mask).long() - 1 + 2)


class NumberBuffer(Model):
    """As BERT does: a buffer of numbers is cut at the length."""

    def embedded(self, input_ids):
        return self.embed(input_ids) + self.places(self.numbers[:, : input_ids.shape[1]])


class Table(Model):
    def turn(self, x, length):
        return x * self.rows[:length]


class TableForHeads(Model):
    def turn(self, x, length):
        return x * self.rows_for_heads[:, :, :length]


class TableBeforeHeads(Model):
    def turn(self, x, length):
        return (x.transpose(1, 2) * self.rows_before_heads[:, :length]).transpose(1, 2)


class ArangeAndTable(Arange):
    turn = Table.turn


class Angles(Model):
    def turn(self, x, length):
        angles = torch.arange(length, dtype=x.dtype)[None, :, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
        return x * angles.cos()[:, None]


class OuterProduct(Model):
    """`outer` takes vectors only."""

    def turn(self, x, length):
        return x * torch.outer(torch.arange(length).to(x.dtype), torch.tensor([1.0, 0.1, 0.01, 0.001])).cos()


class TableView(Model):
    """The cut table is brought into shape by its length."""

    def turn(self, x, length):
        return (x.transpose(1, 2) * self.rows[:length].view(1, length, 1, 4)).transpose(1, 2)


class SplitTable(Model):
    """As RoFormer does: a table of sines and cosines is looked up by number, then split in two."""

    def turn(self, x, length):
        sin, cos = torch.nn.functional.embedding(torch.arange(length), self.rows)[None, None].chunk(2, dim=-1)
        return x * torch.cat((cos, cos), -1) + x.flip(-1) * torch.cat((sin, sin), -1)


class ComplexTable(Model):
    """As the first Llama does: complex numbers turn pairs."""

    def turn(self, x, length):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], 2, 2))
        turns = torch.view_as_complex(self.rows.reshape(LIMIT, 2, 2).contiguous())[:length].view(1, 1, length, 2)
        return torch.view_as_real(pairs * turns).flatten(-2)


class OneRowOnly(Model):
    """Places stand before rows, and rows are laid side by side: there is no room for a table per row."""

    def embedded(self, input_ids):
        x = self.embed(input_ids)
        rows, length, hidden = x.shape
        y = x.transpose(0, 1).reshape(length, rows * hidden) * self.rows[:length, :1]
        return y.reshape(length, rows, hidden).transpose(0, 1)


class GivenPositions(Model):
    def forward(self, input_ids, positions):
        x = self.embed(input_ids) + self.places(positions)
        out = torch.ops.semkv.attention(
            *(self.split(p(x)) for p in (self.q, self.k, self.v)), positions, site=0, scale=0.5
        )
        return self.lm_head(x + self.o(out.transpose(1, 2).reshape(x.shape)))


class Ones(Model):
    """A tensor of the sequence's length that is the same for all tokens."""

    def embedded(self, input_ids):
        return self.embed(input_ids) * torch.ones(input_ids.shape[1], 1).double()


class Backwards(Model):
    """The last token is always number 0: no incremental program can know."""

    def embedded(self, input_ids):
        length = input_ids.shape[1]
        return self.embed(input_ids) + self.places(length - 1 - torch.arange(length))


class Squares(Model):
    """Neither a position nor a table's rows: made from sizes by an operator that cannot follow positions."""

    def embedded(self, input_ids):
        return self.embed(input_ids) + torch.linspace(0, 1, 3).double().sum() * torch.arange(
            0, 3 * input_ids.shape[1], 3
        ).to(torch.float64).unsqueeze(-1)


LIFTED = {
    Arange: True,
    ArangeWithOffset: True,
    CumulativeSum: True,
    NumberBuffer: True,
    Table: True,
    TableForHeads: True,
    TableBeforeHeads: True,
    ArangeAndTable: True,
    Angles: True,
    OuterProduct: True,
    TableView: True,
    SplitTable: True,
    ComplexTable: True,
    OneRowOnly: False,
}


def lifted(make_found, module_class):
    module = module_class().double().eval()
    program = make_found(module, vocab_size=31, max_positions=LIMIT, max_length=LIMIT)
    return module, program, LiftPositions().run(program, PassOptions())


def reads_positions(program) -> bool:
    positions = placeholders(program.body.graph)["positions"]
    return any("attention" not in str(user.target) and "size" not in str(user.target) for user in positions.users)


@pytest.mark.parametrize("module_class", LIFTED, ids=lambda c: c.__name__)
def test_one_token_at_its_position(make_found, module_class):
    module, before, program = lifted(make_found, module_class)
    spec.check(program)
    assert program.batched is LIFTED[module_class]
    assert not reads_positions(before)
    assert reads_positions(program)
    for step in (SurprisalHead(), AssignBudgets(), RewriteAttention()):
        program = step.run(program, PassOptions())
    rows = 2 if program.batched else 1
    ids = torch.randint(0, 31, (rows, 20), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(20).expand(rows, 20).contiguous()
    state = PlainMemory(program.sites)
    with torch.no_grad():
        hidden = [program.prefill(ids[:, :12], positions[:, :12], state)]
        hidden.append(program.extend(ids[:, 12:17], positions[:, 12:17], state))
        hidden += [program.decode(ids[:, t : t + 1], positions[:, t : t + 1], state) for t in range(17, 20)]
        logits = program.head(torch.cat(hidden, 1))
        torch.testing.assert_close(logits, module(ids, positions), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("module_class", [c for c, batched in LIFTED.items() if batched], ids=lambda c: c.__name__)
def test_rows_have_their_own_positions(make_found, module_class):
    _module, _, program = lifted(make_found, module_class)
    ids = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(0))
    places = torch.stack((torch.arange(9), torch.arange(20, 29)))
    with torch.no_grad():
        together = program.body(ids, places)
        for row in range(2):
            torch.testing.assert_close(together[row : row + 1], program.body(ids[row : row + 1], places[row : row + 1]))


def test_operator_counts(make_found):
    _, before, after = lifted(make_found, TableForHeads)

    def count(program, target):
        return sum(node.target == target for node in program.body.graph.nodes)

    assert (count(before, aten.slice.Tensor), count(after, aten.slice.Tensor)) == (2, 0)
    assert (count(before, aten.index.Tensor), count(after, aten.index.Tensor)) == (0, 2)
    assert "2 values follow the position input" in after.notes[-1]


@pytest.mark.parametrize("module_class", [GivenPositions, Ones, Model], ids=lambda c: c.__name__)
def test_nothing_to_lift(make_found, module_class):
    _, before, after = lifted(make_found, module_class)
    assert after.notes[-1] == "lift_positions: no positions are made inside"
    assert [n.target for n in before.body.graph.nodes] == [n.target for n in after.body.graph.nodes]


@pytest.mark.parametrize(
    ("module_class", "text"),
    [
        (Backwards, r"aten.embedding.default \(embedding_1, in places\) depends on the sequence length"),
        (Squares, "makes a value of the sequence's length that is neither position . constant nor rows of a table"),
    ],
)
def test_what_cannot_follow_positions_is_refused(make_found, module_class, text):
    with pytest.raises(CaptureError, match=text):
        lifted(make_found, module_class)


def test_input_is_not_changed(make_found):
    module = Arange().double().eval()
    program = make_found(module, vocab_size=31, max_positions=LIMIT, max_length=LIMIT)
    before = str(program.body.graph)
    LiftPositions().run(program, PassOptions())
    assert str(program.body.graph) == before
