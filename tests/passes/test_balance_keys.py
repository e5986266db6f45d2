"""Keys that are balanced: nothing that a model answers changes, and few bits hold more of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from semkv.errors import ConfigError
from semkv.ir import spec
from semkv.ir.plain_memory import PlainMemory
from semkv.passes.assign_budgets import AssignBudgets
from semkv.passes.balance_keys import BalanceKeys
from semkv.passes.base import PassOptions
from semkv.passes.group_heads import GroupHeads
from semkv.passes.rewrite_attention import RewriteAttention
from semkv.passes.surprisal_head import SurprisalHead
from semkv.profiles.calibration.codebooks import balance_of
from semkv.profiles.schema.codes import Codebooks, KeyBalance
from semkv.runtime.store.quantization import dequantize, quantize

ROLES = ("volatile", "pivot", "volatile", "satellite")


class TwoReaders(nn.Module):
    """Two attentions of 8 query and 4 KV heads that read the same keys and values."""

    extras: tuple[nn.Parameter, ...] = ()
    softcap = 0.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lm_head = nn.Embedding(31, 32), nn.Linear(32, 31, bias=False)
        self.q, self.k, self.v = nn.Linear(32, 64), nn.Linear(32, 32), nn.Linear(32, 32)
        self.o, self.again = nn.Linear(64, 32), nn.Linear(32, 64)
        self.sinks = nn.Parameter(torch.randn(8))

    def forward(self, input_ids, positions):
        x = self.embed(input_ids)
        rows, length, _ = x.shape
        k, v = (part(x).view(rows, length, 4, 8).transpose(1, 2) for part in (self.k, self.v))
        for site, part in enumerate((self.q, self.again)):
            q = part(x).view(rows, length, 8, 8).transpose(1, 2)
            out = torch.ops.semkv.attention(
                q, k, v, positions, *self.operands(), site=site, scale=0.3, softcap=self.softcap
            )
            x = x + self.o(out.transpose(1, 2).reshape(rows, length, 64))
        return self.lm_head(x)

    def operands(self):
        return ()


class Sinks(TwoReaders):
    def operands(self):
        return (self.sinks,)


class Capped(TwoReaders):
    softcap = 5.0


def balance(mean: bool = True) -> KeyBalance:
    generator = torch.Generator().manual_seed(7)
    means, powers = (torch.randn(4, 8, generator=generator) for _ in range(2))
    return KeyBalance(means * mean, powers.round().exp2())


def lowered(make_found, module, given: KeyBalance | None):
    options = PassOptions(method="sekv", head_roles=(ROLES,), key_balance=None if given is None else {0: given})
    program = make_found(module.double().eval(), vocab_size=31)
    program = program.evolve(sites=tuple(replace(site, store=0) for site in program.sites))
    for step in (SurprisalHead(), AssignBudgets(), GroupHeads(), BalanceKeys()):
        if step.applies(program, options):
            program = step.run(program, options)
            spec.check(program)
    return RewriteAttention().run(program, options)


def read(program):
    """Logits of a prompt and a second turn, and the keys that the memory holds."""
    ids = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(3))
    positions, state = torch.arange(9).expand(2, 9).contiguous(), PlainMemory(program.sites)
    with torch.no_grad():
        hidden = [
            program.prefill(ids[:, :6], positions[:, :6], state),
            program.extend(ids[:, 6:], positions[:, 6:], state),
        ]
        return program.head(torch.cat(hidden, 1)), state.tensors[0][0]


@pytest.mark.parametrize(("module", "mean"), [(TwoReaders, True), (Sinks, False), (Capped, False)])
def test_answers_stay_and_keys_are_balanced(make_found, module, mean):
    """Exact over a prompt and a turn, with heads moved; what the memory holds are the keys of the plain program, mapped."""
    given = balance(mean)
    (wanted, plain), (found, held) = (read(lowered(make_found, module(), x)) for x in (None, given))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    moved = given.heads([0, 2, 1, 3])
    torch.testing.assert_close(held, (plain - moved.mean.double()[:, None]) * moved.scale.double()[:, None])
    assert not torch.allclose(held, plain)


@pytest.mark.parametrize("module", [Sinks, Capped])
def test_a_mean_is_refused_where_it_would_change_weights(make_found, module):
    with pytest.raises(ConfigError, match="soft-capped or have sinks"):
        lowered(make_found, module(), balance())


def test_a_balance_of_another_model_is_refused(make_found):
    given = balance()
    with pytest.raises(ConfigError, match=r"\(3, 8\) and \(4, 8\), expected \(4, 8\)"):
        lowered(make_found, TwoReaders(), replace(given, mean=given.mean[:3]))


@pytest.mark.parametrize("rank", [3, 8])
def test_codes_of_balanced_keys_are_those_of_keys(rank):
    """So are their products with queries, and what codes stand for."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    books, given = Codebooks(draw(4, 8), draw(4, 3, 256, rank), draw(4, 8, rank)), balance()
    keys, queries = draw(4, 50, 8), draw(4, 5, 8)
    there, mapped = books.balanced(given), (keys - given.mean[:, None]) * given.scale[:, None]
    codes = books.encode(keys)
    assert bool((there.encode(mapped) == codes).float().mean() > 0.99)
    torch.testing.assert_close(
        there.tables(queries / given.scale[:, None]), books.tables(queries), rtol=1e-4, atol=1e-4
    )
    stands = (books.decode(codes) - given.mean[:, None]) * given.scale[:, None]
    torch.testing.assert_close(there.decode(codes), stands, rtol=1e-4, atol=1e-4)


def test_products_with_keys_in_4_bits_are_nearer():
    """Keys with a large mean and few wide channels, as those behind a rotary embedding: by less than half the error each."""
    generator = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(*shape, generator=generator).double()  # noqa: E731
    wide = torch.tensor([16.0, 8.0, *[1.0] * 14]).double()
    keys, queries = draw(1, 400, 16) * wide + 20 * draw(1, 1, 16), draw(1, 60, 16) / wide
    mean, variance = keys.mean(1), keys.var(1)
    scale = balance_of(queries.mT @ queries / 60, variance)
    assert bool((scale.log2() == scale.log2().round()).all())

    def error(mean, scale):
        mapped = ((keys - mean) * scale).float()
        apart = (queries / scale) @ (dequantize(quantize(mapped, 4)) - mapped).double().mT
        return float((apart - apart.mean(-1, keepdim=True)).std())

    plain, centred, both = error(0, 1), error(mean, 1), error(mean, scale)
    assert centred < plain / 2
    assert both < centred / 2
