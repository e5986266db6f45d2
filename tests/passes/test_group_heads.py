"""KV heads of one role side by side: exact, folded into weights where heads are alike on the way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from semkv.ir import spec
from semkv.ir.plain_memory import PlainMemory
from semkv.passes.assign_budgets import AssignBudgets
from semkv.passes.base import PassOptions
from semkv.passes.group_heads import GroupHeads, head_order
from semkv.passes.rewrite_attention import RewriteAttention
from semkv.passes.surprisal_head import SurprisalHead

aten = torch.ops.aten
ROLES = ("volatile", "pivot", "volatile", "satellite")


class OneSite(nn.Module):
    """One attention over 8 query and 4 KV heads; subclasses change what happens between projections and site."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lm_head = nn.Embedding(31, 32), nn.Linear(32, 31, bias=False)
        self.q, self.k, self.v = nn.Linear(32, 64), nn.Linear(32, 32), nn.Linear(32, 32)
        self.o = nn.Linear(64, 32)
        self.norm_weight = nn.Parameter(torch.rand(8) + 0.5)
        self.head_scale = nn.Parameter(torch.rand(4, 1, 1) + 0.5)
        self.sinks = nn.Parameter(torch.randn(8))
        self.slopes = nn.Parameter(torch.rand(8))

    def project(self, x):
        rows, length, _ = x.shape
        q = self.q(x).view(rows, length, 8, 8).transpose(1, 2)
        k = self.k(x).view(rows, length, 4, 8).transpose(1, 2)
        v = self.v(x).view(rows, length, 4, 8).transpose(1, 2)
        return q, k, v

    def after(self, out):
        return self.o(out.transpose(1, 2).reshape(*out.shape[0:3:2], 64))

    def forward(self, input_ids, positions):
        x = self.embed(input_ids)
        q, k, v = self.project(x)
        out = torch.ops.semkv.attention(q, k, v, positions, *self.extras(), site=0, scale=0.3)
        return self.lm_head(x + self.after(out))

    def extras(self):
        return ()


class HeadNorm(OneSite):
    """A norm over the head dim with weights that all heads share, as Qwen3 has."""

    def project(self, x):
        q, k, v = super().project(x)
        return q, self.norm_weight * k * (k.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(), v


class OwnScale(OneSite):
    """A scale per KV head: heads are not alike, the weights alone cannot be permuted."""

    def project(self, x):
        q, k, v = super().project(x)
        return q, k * self.head_scale, v


class FusedProjection(OneSite):
    """One projection for q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 128)

    def project(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).split((64, 32, 32), -1)
        views = [part.reshape(rows, length, -1, 8).transpose(1, 2) for part in (q, k, v)]
        return tuple(views)


class GatedOutput(OneSite):
    """A gate between attention and its output projection."""

    def after(self, out):
        flat = out.transpose(1, 2).reshape(*out.shape[0:3:2], 64)
        return self.o(flat * torch.sigmoid(flat.sum(-1, keepdim=True)) * torch.linspace(0, 1, 64, dtype=out.dtype))


class SinksAndSlopes(OneSite):
    def extras(self):
        return self.sinks, self.slopes


class SharedWeights(OneSite):
    """The key projection also makes the values: permuting it twice would be wrong."""

    def project(self, x):
        q, k, _ = super().project(x)
        return q, k, k


CASES = {
    OneSite: (4, 0),
    HeadNorm: (4, 0),
    OwnScale: (3, 1),
    FusedProjection: (1, 3),
    GatedOutput: (3, 1),
    SinksAndSlopes: (4, 0),
    SharedWeights: (2, 2),
}


def annotated(make_found, module, roles=ROLES):
    options = PassOptions(method="sekv", head_roles=(roles,))
    program = make_found(module.double().eval(), vocab_size=31)
    for step in (SurprisalHead(), AssignBudgets()):
        program = step.run(program, options)
    return program, options


def logits_of(program, ids):
    positions = torch.arange(ids.shape[1]).expand(ids.shape).contiguous()
    state = PlainMemory(program.sites)
    hidden = [program.prefill(ids[:, :6], positions[:, :6], state), program.extend(ids[:, 6:], positions[:, 6:], state)]
    return program.head(torch.cat(hidden, 1))


@pytest.mark.parametrize("module_class", CASES, ids=lambda c: c.__name__)
def test_grouping_is_exact(make_found, module_class):
    module = module_class()
    program, options = annotated(make_found, module)
    grouped = GroupHeads().run(program, options)
    spec.check(grouped)
    folded, selected = CASES[module_class]
    assert grouped.notes[-1] == (
        f"group_heads: {folded} projections permuted, {selected} activations reordered at run time"
    )
    assert grouped.sites[0].head_order == (0, 2, 1, 3)
    assert grouped.sites[0].roles == ("volatile", "volatile", "pivot", "satellite")
    ids = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        before = logits_of(RewriteAttention().run(program, options), ids)
        after = logits_of(RewriteAttention().run(grouped, options), ids)
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


def test_operator_counts(make_found):
    program, options = annotated(make_found, OwnScale())
    grouped = GroupHeads().run(program, options)

    def selects(p):
        return sum(node.target == aten.index_select.default for node in p.body.graph.nodes)

    assert (selects(program), selects(grouped)) == (0, 1)


def test_heads_really_move(make_found):
    """The control: what reaches the memory is in the new order."""
    program, options = annotated(make_found, OneSite())
    grouped = GroupHeads().run(program, options)
    ids, positions = torch.arange(5)[None], torch.arange(5)[None]
    keys = []
    for p in (program, grouped):
        state = PlainMemory(p.sites)
        with torch.no_grad():
            RewriteAttention().run(p, options).prefill(ids, positions, state)
        keys.append(state.tensors[0][0])
    assert not torch.allclose(keys[0], keys[1])
    torch.testing.assert_close(keys[0][:, list(grouped.sites[0].head_order)], keys[1], rtol=1e-12, atol=1e-12)


def test_nothing_to_do(make_found):
    program, options = annotated(make_found, OneSite(), roles=("a", "a", "b", "b"))
    assert not GroupHeads().applies(program, options)
    program, options = annotated(make_found, OneSite())
    assert GroupHeads().applies(program, options)


def test_the_users_weights_stay(make_found):
    module = OneSite()
    before = {name: tensor.clone() for name, tensor in module.double().state_dict().items()}
    program, options = annotated(make_found, module)
    grouped = GroupHeads().run(program, options)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    own = {parameter.data_ptr() for parameter in module.parameters()}
    copied = [name for name, p in grouped.body.named_parameters() if p.data_ptr() not in own]
    assert len(copied) == 7, "weights and biases of q, k and v, the weight of o"


def test_head_order_keeps_order_within_roles():
    assert head_order(("b", "a", "b", "a", "c")) == (0, 2, 1, 3, 4)
    assert head_order(("a", "a")) == (0, 1)
