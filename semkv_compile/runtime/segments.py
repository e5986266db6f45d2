"""How a row's tokens were divided into what stays exact and what is folded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segmentation:
    """A division of tokens 0..n-1 of one row, shared by all its layers and heads.

    Attributes
    ----------
    kept: int64 [a], ascending: tokens that stay exact wherever they are (sinks, anchors, short spans).
    starts, lengths: int64 [m]: spans [start, start + length), ascending, disjoint, none holding a kept token.
    recent: the first token of the recent window; tokens from there on stay exact.

    Every token is in exactly one of the three.
    """

    kept: Tensor
    starts: Tensor
    lengths: Tensor
    recent: int

    @property
    def folded(self) -> Tensor:
        """int64 [sum of lengths]: the tokens of all spans, in order."""
        if not len(self.starts):
            return torch.empty(0, dtype=torch.int64)
        ends = self.lengths.cumsum(0)
        inside = torch.arange(int(ends[-1])) - (ends - self.lengths).repeat_interleave(self.lengths)
        return self.starts.repeat_interleave(self.lengths) + inside


def span_of_token(lengths: Tensor) -> Tensor:
    """int64 [sum of lengths]: for each folded token the span that holds it."""
    return torch.arange(len(lengths)).repeat_interleave(lengths)


def weighted_mean(x: Tensor, weights: Tensor, lengths: Tensor) -> Tensor:
    """Means over spans: x [H, n, D] of n folded tokens, weights [n] that sum to 1 in each span -> [H, m, D], float32."""
    out = torch.zeros(x.shape[0], len(lengths), x.shape[2], dtype=torch.float32, device=x.device)
    return out.index_add_(1, span_of_token(lengths).to(x.device), x.float() * weights[None, :, None])


def surprisal_weights(surprisal: Tensor, lengths: Tensor) -> Tensor:
    """SeKV Eq. 2: each token's share of its span's surprisal; uniform where a span's surprisal is zero.

    surprisal [n] in nats, of the folded tokens in order -> [n].
    """
    span = span_of_token(lengths)
    total = torch.zeros(len(lengths)).index_add_(0, span, surprisal)
    uniform = 1.0 / lengths.float()
    return torch.where(total[span] > 0, surprisal / total[span].clamp(min=1e-20), uniform[span])


def uniform_weights(lengths: Tensor) -> Tensor:
    """Equal weights that sum to 1 in each span, [n]."""
    return (1.0 / lengths.float())[span_of_token(lengths)]
