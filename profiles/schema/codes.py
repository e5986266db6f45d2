"""Codes of keys and values in residual codebooks: per vector and stage the number of the nearest of 256 vectors, a byte."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

VECTORS = 256
"""Of a stage: their numbers take a byte."""


@dataclass(frozen=True)
class KeyBalance:
    """A map of keys of some KV heads after which a scale per vector keeps more of them in few bits: k becomes (k - mean) * scale, a query
    of these heads q / scale.

    mean, scale: float32 [H, D]. Every softmax stays as it is: of a query's products with all keys, the scale changes none, the mean each
    by the same number. scale: powers of two, which round nothing.
    """

    mean: Tensor
    scale: Tensor

    def heads(self, order: list[int]) -> KeyBalance:
        """Of KV heads `order`."""
        return KeyBalance(self.mean[order], self.scale[order])


@dataclass(frozen=True)
class Codebooks:
    """Residual codebooks of some KV heads (residual vector quantisation: Juang & Gray, 1982).

    A vector is the mean, plus a vector of the first stage's book, plus one of the second's, which stands for what the first left, and so
    on. For keys all but the mean is in a space in which the distance of two keys is the mean square by which products with this head's
    queries differ: where root root^T is the second moment of the queries, |(k - k') root|^2 = E[(q.k - q.k')^2]. Of that space R
    directions are kept (`semkv.profiles.calibration.codebooks.space_of`).

    mean float32 [H, D]; books float32 [H, S, VECTORS, R]; root float32 [H, D, R], None where vectors are compared as they are (R = D).
    back: float32 [H, R, D] from that space; None: what is inverse to `root`, whose directions are those of the queries then. The first
    stages of a code are themselves a code, of fewer bytes.
    """

    mean: Tensor
    books: Tensor
    root: Tensor | None = None
    back: Tensor | None = None

    @property
    def stages(self) -> int:
        """S, bytes per vector and head."""
        return self.books.shape[1]

    @cached_property
    def inverse(self) -> Tensor:
        """float32 [H, R, D] of `root`, on what it spans."""
        if self.back is not None:
            return self.back
        if self.root is None:
            return torch.eye(self.mean.shape[-1], dtype=torch.float32, device=self.mean.device).expand(
                len(self.mean), -1, -1
            )
        return torch.linalg.pinv(self.root.double()).float()

    def balanced(self, balance: KeyBalance) -> Codebooks:
        """The same codes of keys that come balanced; their products with queries that come so are the same too."""
        scale = balance.scale.to(self.mean)
        root = None if self.root is None else self.root / scale[..., None]
        back = self.inverse * scale[:, None]
        return Codebooks((self.mean - balance.mean.to(self.mean)) * scale, self.books, root, back)

    @cached_property
    def biases(self) -> Tensor:
        """float32 [H, S, VECTORS]: the vectors' square lengths below 0."""
        return -self.books.square().sum(-1)

    def inward(self, x: Tensor) -> Tensor:
        """Vectors [H, n, D] in the space of the books: float32 [H, n, R]."""
        rest = x.float() - self.mean[:, None].to(x.device)
        return rest if self.root is None else rest @ self.root.to(x.device)

    def encode(self, x: Tensor) -> Tensor:
        """Codes uint8 [H, n, S] of vectors [H, n, D], where these are: stage by stage the nearest one."""
        rest, found = self.inward(x), []
        for book, bias in zip(self.books.to(x.device).unbind(1), self.biases.to(x.device).unbind(1)):
            code = _nearest(rest, book, bias[:, None])
            found.append(code)
            if len(found) < self.stages:
                rest = rest - book.gather(1, code[..., None].expand(-1, -1, book.shape[-1]))
        return torch.stack(found, -1).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """The vectors float32 [H, n, D] that codes [H, n, S] stand for."""
        heads, count, _ = codes.shape
        found = self.books.new_zeros(heads, count, self.books.shape[-1])
        for stage, book in enumerate(self.books.unbind(1)):
            found += torch.take_along_dim(book, codes[..., stage, None].long(), 1)
        return self.mean[:, None] + (found if self.root is None else found @ self.inverse)

    def tables(self, q: Tensor) -> Tensor:
        """What each vector adds to a product with queries q [H, R, D]: float32 [H, R, S, VECTORS]. Of a decoded key's product with a
        query only the mean's is not in them, which is the same for all keys."""
        return (q.float() @ self.inverse.mT @ self.books.flatten(1, 2).mT).unflatten(-1, (self.stages, VECTORS))

    def average(self, weights: Tensor, codes: Tensor) -> Tensor:
        """Sums float32 [H, R, D] of the vectors that codes [H, n, S] stand for, by weights [H, R, n] that add up to 1 in each row: each
        vector of a book has the weights of all codes that name it."""
        out = self.mean[:, None].expand(-1, weights.shape[1], -1)
        for stage, book in enumerate(self.books.unbind(1)):
            at = codes[:, None, :, stage].long().expand(-1, weights.shape[1], -1)
            total = weights.new_zeros(*weights.shape[:2], VECTORS).scatter_add_(-1, at, weights)
            out = out + total @ book
        return out


def nearest(x: Tensor, book: Tensor) -> Tensor:
    """Which of book [H, V, D] is nearest to each of x [H, n, D]: int64 [H, n]."""
    return _nearest(x, book, -book.square().sum(-1)[:, None])


def _nearest(x: Tensor, book: Tensor, bias: Tensor) -> Tensor:
    """`nearest`; bias [H, 1, V]: the vectors' square lengths below 0. The square of x, the same for all of them, is left out."""
    return torch.baddbmm(bias, x, book.mT, alpha=2).argmax(-1)
