"""Divide a prompt into chunks at delimiters, and the keys of each chunk into clusters around greedily chosen seeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from semkv.errors import BudgetError
from semkv.ir.site import AttentionSite
from semkv.methods.sentences import BROKEN, ENDED, FULL, HARD, SOFT
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.store.segments import Segmentation

MARKS = ".!?;:\n。！？；：…"
"""Characters that end a chunk."""

CLOSING = "\"')]}»”’ \t"
"""Characters that may stand behind a mark in the same token."""

BATCH = 256
"""Chunks that are clustered at once."""


def delimiter_ids(tokenizer: Any) -> tuple[int, ...]:
    """Ids of the tokens of a Hugging Face tokenizer whose text ends with a mark of punctuation or a line break."""
    texts = ((token, tokenizer.decode([token]).rstrip(CLOSING)) for token in range(len(tokenizer)))
    return tuple(token for token, text in texts if text and text[-1] in MARKS)


def sentence_delimiters(classes: Tensor) -> tuple[int, ...]:
    """Ids of the tokens that may end a sentence: those of classes uint8 [vocab] (`semkv.methods.sentences`) that end with a full
    stop, another mark or a line break, and special tokens.

    Of the `MARKS` of `delimiter_ids`, semicolons and colons end no sentence and are not there, nor are abbreviations ("Dr.").
    Tokens beyond the table are no delimiters.
    """
    ends = torch.tensor([SOFT, HARD, FULL, ENDED, BROKEN], dtype=classes.dtype, device="cpu")
    return tuple(torch.nonzero(torch.isin(classes // 16, ends))[:, 0].tolist())


@dataclass(frozen=True)
class SemanticClusters:
    """Chunks end behind delimiters and have at most `longest` tokens; clusters are those of `cluster`, per KV head.

    The budget says how many clusters there are, chunks share them by length, and so each head has as many. delimiters: token
    ids. window: recent tokens that stay exact, at most `share` of the room. sinks: first tokens that stay exact. generated:
    generated tokens per cluster.
    """

    delimiters: tuple[int, ...] = ()
    longest: int = 32
    window: int = 64
    share: float = 1 / 3
    sinks: int = 4
    fold_chunk: int = 16
    generated: int = 4

    per_store: ClassVar[bool] = True
    per_head: ClassVar[bool] = True
    reads_surprisal: ClassVar[bool] = False

    def segment(
        self, record: RowRecord, store: AttentionSite, room: float, unit_cost: float, page_size: int
    ) -> Segmentation:
        n, heads = record.tokens, store.kv_heads
        window = max(page_size, min(self.window, int(room * self.share) // page_size * page_size))
        recent = n - min(window, n)
        first = min(self.sinks, recent)
        kept = -(-first // page_size) * page_size
        # Each head has sizes and positions of its own; in two bytes per number they take the most tokens.
        cost = unit_cost + 8 * (1 - store.once / heads) / (2 * (store.key_dim + store.value_dim) + 4)
        most = int((room - window - self.fold_chunk - kept) / cost)
        lengths = self.chunks(record.ids[first:recent])
        if most < 1 and len(lengths):
            raise BudgetError(
                f"{room:.0f} tokens per KV head leave no room for clusters beside a window of {window} and {kept} first "
                "tokens: raise the budget"
            )
        while len(lengths) > most:
            lengths = F.pad(lengths, (0, len(lengths) % 2)).unflatten(0, (-1, 2)).sum(1)
        k = record.keys[store.store][store.first_head : store.first_head + heads, first:recent]
        units = cluster(k, lengths, shared_out(lengths, most))
        starts = torch.arange(first, recent, dtype=torch.int64, device="cpu")
        return Segmentation(
            torch.arange(first, dtype=torch.int64, device="cpu"), starts, torch.ones_like(starts), recent, units
        )

    def segment_more(self, ids: Tensor, surprisal: Tensor, k: Tensor) -> Segmentation:
        lengths = self.chunks(ids)
        units = cluster(k, lengths, -(-lengths // self.generated))
        return Segmentation.of_lengths(torch.ones(len(ids), dtype=torch.int64, device="cpu"), units)

    def chunks(self, ids: Tensor) -> Tensor:
        """Lengths int64 of the chunks of ids [n]."""
        ends = torch.isin(ids, torch.tensor(self.delimiters, dtype=ids.dtype, device="cpu")).tolist()
        lengths, run = [], 0
        for place, end in enumerate(ends):
            run += 1
            if end or run == self.longest or place == len(ends) - 1:
                lengths.append(run)
                run = 0
        return torch.tensor(lengths, dtype=torch.int64, device="cpu")


def shared_out(lengths: Tensor, total: int) -> Tensor:
    """int64, for each chunk its clusters: in proportion to `lengths`, 1 to its length, `total` in all or all tokens if less."""
    if not len(lengths):
        return lengths
    total = min(total, int(lengths.sum()))
    exact = (lengths * total).float() / lengths.sum()
    counts = exact.long().clamp(min=1)
    for place in torch.argsort(exact - counts, descending=True, stable=True).tolist():
        if int(counts.sum()) >= total:
            break
        counts[place] += int(counts[place] < lengths[place])
    for _ in range(int(counts.sum()) - total):  # some chunks got one although their share was less
        counts[counts.argmax()] -= 1
    return counts


def cluster(k: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
    """Clusters int64 [Hkv, n], on the host, of the keys k [Hkv, n, D] of chunks of `lengths` int64 [c], `counts` int64 [c] in each chunk.

    Seeds are chosen greedily: the chunk's first token, then always the token that is least like (cosine) any seed; each token
    joins the seed that it is most like. Clusters are numbered in the order of their seeds.
    """
    direction = F.normalize(k.float(), dim=-1)
    starts = lengths.cumsum(0) - lengths
    base = counts.cumsum(0) - counts
    out = torch.zeros(k.shape[:2], dtype=torch.int64, device="cpu")
    for at in torch.argsort(lengths, stable=True).split(BATCH):  # alike in length, so that little is padded
        inside = torch.arange(int(lengths[at].max()) if len(at) else 0, dtype=torch.int64, device="cpu")
        valid = inside < lengths[at, None]
        token = (starts[at, None] + inside).clamp(max=max(0, k.shape[1] - 1))
        labels = _clustered(direction[:, token.to(k.device)], valid.to(k.device), counts[at])
        out[:, token[valid]] = (labels.cpu() + base[at, None])[:, valid]
    return out


def _clustered(x: Tensor, valid: Tensor, counts: Tensor) -> Tensor:
    """Cluster of each token in its chunk, int64 [H, c, L]: directions x [H, c, L, D], valid bool [c, L], counts int64 [c]."""
    heads, chunks, longest, _ = x.shape
    most, counts, here = int(counts.max()), counts.to(x.device), x.device
    near = torch.full((heads, chunks, longest), -2.0, dtype=torch.float32, device=here)  # cosine to the nearest seed
    owner = torch.zeros(heads, chunks, longest, dtype=torch.int64, device=here)  # place of that seed
    seeds = torch.zeros(heads, chunks, longest, dtype=torch.bool, device=here)
    place = torch.zeros(heads, chunks, dtype=torch.int64, device=here)
    for step in range(most):
        going = (counts > step).expand(heads, -1)[..., None]
        seed = x.gather(2, place[..., None, None].expand(-1, -1, 1, x.shape[-1]))
        like = (x * seed).sum(-1)
        like.scatter_(2, place[..., None], 3.0)  # a seed is its own
        closer = going & (like > near)
        near, owner = torch.where(closer, like, near), torch.where(closer, place[..., None], owner)
        seeds |= going & (torch.arange(longest, dtype=torch.int64, device=here) == place[..., None])
        place = near.masked_fill(seeds | ~valid, 4.0).argmin(-1)
    return (seeds.cumsum(-1) - 1).gather(2, owner)
