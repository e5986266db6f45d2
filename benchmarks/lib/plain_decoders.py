"""Three decoders written in plain PyTorch: ids in, logits out, and nothing of any model library."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, HIDDEN, HEADS, LAYERS, CONTEXT = 199, 64, 4, 2, 512


class Attention(nn.Module):
    """Causal self-attention; subclasses say how positions enter."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.reshape(rows, length, HEADS, -1).transpose(1, 2) for part in (q, k, v))
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class AlibiAttention(Attention):
    """A penalty that grows with distance, a slope per head (Press et al., 2021), written out by hand."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        length = x.shape[1]
        place = torch.arange(length, device=x.device)
        slopes = torch.tensor(
            [2.0 ** (-8.0 * (head + 1) / HEADS) for head in range(HEADS)], dtype=x.dtype, device=x.device
        )
        distance = (place[None, :] - place[:, None]).to(x.dtype)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + slopes[:, None, None] * distance
        scores = scores.masked_fill(place[None, :] > place[:, None], float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


class RotaryAttention(Attention):
    """Rotary positions from tables of cosines and sines that are cut at the length."""

    def __init__(self) -> None:
        super().__init__()
        half = HIDDEN // HEADS // 2
        angles = torch.arange(CONTEXT)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        length = x.shape[2]
        left, right = x.chunk(2, dim=-1)
        return x * self.cos[:length] + torch.cat((-right, left), -1) * self.sin[:length]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.attention = attention()
        self.norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))


class PlainDecoder(nn.Module):
    """Ids [B, T] -> logits [B, T, vocab]."""

    attention: type[Attention] = Attention

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block(self.attention) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def embedded(self, ids: Tensor) -> Tensor:
        return self.embed(ids)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedded(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


class LearnedPositions(PlainDecoder):
    """A learned vector per absolute position, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(CONTEXT, HIDDEN)

    def embedded(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))


class Alibi(PlainDecoder):
    """No position in the embedding: attention is biased by distance."""

    attention = AlibiAttention


class PositionsInside(PlainDecoder):
    """Rotary positions that the model makes for itself."""

    attention = RotaryAttention


DECODERS: dict[str, type[PlainDecoder]] = {
    "plain: learned absolute positions": LearnedPositions,
    "plain: ALiBi": Alibi,
    "plain: positions built inside": PositionsInside,
}


def greedy(model: nn.Module, ids: Tensor, new_tokens: int) -> Tensor:
    """The reference: the whole sequence is read again for every token; ids [1, T] -> [1, T + new_tokens]."""
    with torch.no_grad():
        for _ in range(new_tokens):
            ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), 1)
    return ids
