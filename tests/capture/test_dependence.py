"""Tokens may meet at attention sites only: what mixes them elsewhere is refused, what keeps them apart is accepted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from semkv.capture.dependence import CheckDependence
from semkv.errors import CaptureError
from semkv.passes.base import PassOptions

LENGTH = 48


class Model(nn.Module):
    """One attention, then whatever `mix` does to the hidden states [B, T, H]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lm_head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.places = nn.Embedding(LENGTH, 16)

    def split(self, x):
        return x.view(*x.shape[:2], 4, 4).transpose(1, 2)

    def mix(self, x, input_ids, positions):
        return x

    def forward(self, input_ids, positions):
        x = self.embed(input_ids)
        out = torch.ops.semkv.attention(
            *(self.split(p(x)) for p in (self.q, self.k, self.v)), positions, site=0, scale=0.5
        )
        x = x + self.o(out.transpose(1, 2).reshape(x.shape))
        return self.lm_head(self.mix(x, input_ids, positions))


class ShortConvolution(Model):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 3, padding=2, groups=16)

    def mix(self, x, input_ids, positions):
        return x + self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class ZeroConvolution(ShortConvolution):
    """Weights that are zero now need not be zero in another checkpoint; values alone would not show it."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.conv.weight)


class ConvolutionOfKeys(Model):
    """Keys alone are mixed: only what attention scores see."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 2, padding=1, groups=16)

    def forward(self, input_ids, positions):
        x = self.embed(input_ids)
        y = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        out = torch.ops.semkv.attention(
            self.split(self.q(x)), self.split(self.k(y)), self.split(self.v(x)), positions, site=0, scale=0.5
        )
        return self.lm_head(x + self.o(out.transpose(1, 2).reshape(x.shape)))


class TokenShift(Model):
    def mix(self, x, input_ids, positions):
        return x + torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)


class CumulativeSum(Model):
    def mix(self, x, input_ids, positions):
        return x + x.cumsum(1)


class SumOverIds(Model):
    """Through integers alone, where NaN does not go."""

    def mix(self, x, input_ids, positions):
        return x + self.places(input_ids.cumsum(1) % LENGTH)


class NormOverTokens(Model):
    def mix(self, x, input_ids, positions):
        return torch.nn.functional.normalize(x, dim=1)


class LengthFactor(Model):
    def mix(self, x, input_ids, positions):
        return x * (1.0 + input_ids.shape[1])


class OwnPositions(Model):
    """Counts tokens itself: without `lift_positions`, one token alone would be at place 0."""

    def mix(self, x, input_ids, positions):
        return x + self.places(torch.arange(x.shape[1]))


class UnfoundAttention(Model):
    """A second attention that no pattern found."""

    def mix(self, x, input_ids, positions):
        scores = (x @ x.transpose(1, 2)).tril()
        return x + scores.softmax(-1) @ x


class SumOverRows(Model):
    def mix(self, x, input_ids, positions):
        return x + 0.1 * x.sum(0, keepdim=True)


class LargestPosition(Model):
    """As long-RoPE does: all tokens of a call are scaled once the largest position is far."""

    def mix(self, x, input_ids, positions):
        return x * torch.where(positions.max() >= 40, 2.0, 1.0)


class PointwiseConvolution(Model):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 1)

    def mix(self, x, input_ids, positions):
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2)


class Experts(Model):
    """Two of four experts per token, tokens sorted by expert and brought back."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16) / 4)

    def mix(self, x, input_ids, positions):
        flat = x.reshape(-1, 16)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        order = chosen.reshape(-1).argsort()
        token = order // 2
        out = torch.bmm(flat[token][:, None], self.experts[chosen.reshape(-1)[order]])[:, 0]
        out = out * weights.reshape(-1)[order][:, None]
        return x + torch.zeros_like(flat).index_add(0, token, out).view_as(x)


class OneHotExperts(Model):
    """All experts run on all tokens, a mask of zeros and ones picks."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16) / 4)

    def mix(self, x, input_ids, positions):
        gate = torch.nn.functional.one_hot(self.router(x).argmax(-1), 4).to(x.dtype)
        return x + torch.einsum("bth,ehd,bte->btd", x, self.experts, gate)


class IdTable(Model):
    """A table indexed by id, as hash layers and per-layer embeddings have."""

    def mix(self, x, input_ids, positions):
        return x + self.places(input_ids % LENGTH) + self.places(positions)


def analyse(make_found, module_class, **kwargs):
    program = make_found(
        module_class().double().eval(), vocab_size=31, max_positions=LENGTH, max_length=LENGTH, **kwargs
    )
    return CheckDependence().run(program, PassOptions())


@pytest.mark.parametrize(
    ("module_class", "node"),
    [
        (ShortConvolution, "aten.conv1d.*in conv"),
        (ZeroConvolution, "aten.conv1d.*in conv"),
        (ConvolutionOfKeys, "aten.conv1d.*in conv"),
        (TokenShift, "aten.add.Tensor"),
        (CumulativeSum, "aten.cumsum"),
        (SumOverIds, "aten.cumsum"),
        (NormOverTokens, "aten.linalg_vector_norm"),
        (UnfoundAttention, "aten.matmul"),
    ],
)
def test_mixing_is_refused_by_name(make_found, module_class, node):
    with pytest.raises(CaptureError, match=f"{node}.* mixes tokens outside an attention site: token 5 changes others"):
        analyse(make_found, module_class)


@pytest.mark.parametrize("module_class", [LengthFactor, OwnPositions])
def test_dependence_on_length_is_refused(make_found, module_class):
    with pytest.raises(CaptureError, match="run alone differ from the same tokens inside a sequence"):
        analyse(make_found, module_class)


@pytest.mark.parametrize("module_class", [Model, PointwiseConvolution, Experts, OneHotExperts, IdTable])
def test_what_keeps_tokens_apart_is_accepted(make_found, module_class):
    program = analyse(make_found, module_class)
    assert program.batched
    assert program.notes[-1] == "dependence: tokens mix at the 1 sites only"


def test_rows_that_change_each_other_run_alone(make_found):
    program = analyse(make_found, SumOverRows)
    assert not program.batched
    assert "rows of a batch change each other; rows run one at a time" in program.notes[-1]


def test_largest_position_is_taken_per_row(make_found):
    program = analyse(make_found, LargestPosition)
    assert not program.batched
    assert "a far position changes the other tokens of its call" in program.notes[-1]


def test_a_fixed_batch_stays_one(make_found):
    assert not analyse(make_found, Model, dynamic_batch=False).batched


def test_bias_from_tokens_is_refused(make_found):
    class BiasFromTokens(Model):
        def forward(self, input_ids, positions):
            x = self.embed(input_ids)
            q, k, v = (self.split(p(x)) for p in (self.q, self.k, self.v))
            sinks = x[0, 0, :4]
            out = torch.ops.semkv.attention(q, k, v, positions, sinks, site=0, scale=0.5)
            return self.lm_head(out.transpose(1, 2).reshape(x.shape))

    with pytest.raises(CaptureError, match="has a sink or bias that depends on the tokens; expected constants"):
        analyse(make_found, BiasFromTokens)


def test_a_model_without_ids_is_refused(make_found):
    class NoIds(Model):
        def forward(self, input_ids, positions):
            x = self.places(positions)
            out = torch.ops.semkv.attention(
                *(self.split(p(x)) for p in (self.q, self.k, self.v)), positions, site=0, scale=0.5
            )
            return self.lm_head(out.transpose(1, 2).reshape(x.shape))

    with pytest.raises(CaptureError, match="no node turns input_ids into floating point numbers"):
        analyse(make_found, NoIds)
