"""Choosing tokens before the first layer: a retrieval head's keys of all tokens, and one ranking that every layer goes by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from semkv.ir.program import Program
from semkv.ir.ranks import Ranks
from semkv.ir.site import AttentionSite
from semkv.kernels.mixed_attention.streaming import scores
from semkv.methods.routers import MeansSuffice
from semkv.profiles.schema.retrieval_head import RetrievalHeadSection, group_scores, matched_heads, matches
from semkv.runtime.components import Brought, Cap, Charge, Note
from semkv.runtime.decode.units import Units
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.step import Step
from semkv.runtime.store.quantization import Quantized, bytes_per_vector, products, quantize
from semkv.runtime.views import UnitsView

KEYS, SCALE, UNREAD = "retrieval.keys", "retrieval.scale", "retrieval.unread"
NEWEST = ".newest"
"""After `KEYS` and `SCALE`: those of the newest tokens, so that a step copies few of them."""
JOINED = 256
"""Newest tokens that become part of the others."""
RANKING, SCORES = "retrieval.ranking", "retrieval.scores"
PROMPT_CHUNK = 2048
"""Tokens of a prompt whose keys are made at once."""


@dataclass(frozen=True)
class Ranking:
    """logs float32 [H, T, m]: for the new tokens, the logarithm of how much each KV head of the retrieval head attends to the last m
    tokens, of which the first is token `first`; -inf where it is later than the query. heads: of `of` KV heads, those that they are, where
    processes share the model; empty: all."""

    logs: Tensor
    first: int
    heads: tuple[int, ...] = ()
    of: int = 0


@dataclass(frozen=True, eq=False)
class Speculation:
    """SpeContext's retrieval head at run time (Sec. 4.3).

    Before a step it makes the new tokens' queries and keys, adds the keys to its cache, and leaves in `Step.passing` the largest
    softmax weight over each query group, per KV head: the selection of every layer. Tokens that were generated have keys like
    all others.

    With features, a token's key needs the hidden states of the token before. Of several tokens that run at once only the
    first has them: the others ask with what is known, and their keys are made before the next step.

    selector: `Program.selector`. strict: keys in 8 or 4 bits, whichever fits `share` of the budget, of the newest tokens where
    neither does. batch: one ranking for all heads, by the mean. ranks: the processes that share the model, of which this one has keys of
    the retrieval head's KV heads `heads`, and its budget counts `counted` of all keys; None: it is alone, and has all.
    """

    selector: GraphModule
    section: RetrievalHeadSection
    strict: bool = False
    share: float = 1 / 2
    batch: bool = False
    ranks: Ranks | None = None
    heads: tuple[int, ...] = ()
    counted: float = 1.0

    @classmethod
    def of(
        cls, program: Program, section: RetrievalHeadSection, *, strict: bool = False, batch: bool = False
    ) -> Speculation:
        """For a program with the head in it."""
        assert program.selector is not None
        if program.ranks is None:
            return cls(program.selector, section, strict, batch=batch)
        stores = [site for site in program.stores if site.treatment == "method"]
        read = {
            head
            for site in stores
            for own in site.head_order
            for head in matches(section.kv_heads, site.whole.kv_heads)[own]
        }
        own, full = (sum(x.values_per_token for x in sites) for sites in (stores, [site.whole for site in stores]))
        heads = tuple(sorted(read))
        return cls(program.selector, section, strict, batch=batch, ranks=program.ranks, heads=heads, counted=own / full)

    @property
    def held(self) -> int:
        """KV heads of the retrieval head whose keys are here."""
        return len(self.heads) or self.section.kv_heads

    def notes(self) -> dict[str, Note]:
        """Keys (half precision, or codes and scales), and what the last step left: ids without keys, and hidden states."""
        heads, dim = self.held, self.section.head_dim
        kept = {KEYS: Note((heads, None, dim), torch.float16, charged=True)}
        if self.strict:
            kept = {
                KEYS: Note((heads, None, None), torch.uint8, charged=True),
                SCALE: Note((heads, None, 1), torch.float16, charged=True),
            }
        kept |= {f"{name}{NEWEST}": note for name, note in kept.items()}
        seen = {f"features.{site}": Note((None, None), torch.float32) for site in self.section.feature_sites}
        return kept | seen | {UNREAD: Note((None,), torch.int64)}

    def charge(self) -> Charge:
        """What keys take at most."""
        heads, dim = self.section.kv_heads, self.section.head_dim
        part = {"here": self.held / heads, "counted": self.counted}
        if self.strict:
            return Charge(self.counted * heads * bytes_per_vector(dim, 8), self.share, **part)
        return Charge(self.counted * heads * dim * torch.float16.itemsize, **part)

    # -- prompt --------------------------------------------------------------------------------------------------------

    def read(self, record: RowRecord, notes: dict[str, Tensor], cap: Cap) -> None:
        """Keys of a prompt, within what they may take."""
        n = record.tokens
        bits = 16 if not self.strict else 8 if self._most(8, n, cap) >= n else 4
        most = self._most(bits, n, cap)
        first = max(0, n - most)
        made = [
            {name: x.cpu() for name, x in self._packed(k, bits).items()}
            for start in range(first, n, PROMPT_CHUNK)
            for _, k in self._run(record.ids[start : start + PROMPT_CHUNK], start, self._before(record, start))
        ]
        self._store(notes, {name: torch.cat([part[name] for part in made], 1) for name in made[0]}, most)
        notes[UNREAD] = torch.zeros(0, dtype=torch.int64, device="cpu")
        for site in self.section.feature_sites:
            notes[f"features.{site}"] = record.features[site][-1:].float().clone()

    def _before(self, record: RowRecord, start: int) -> Tensor | None:
        """What a chunk of the prompt from token `start` on needs of the tokens before each of its own: float32 [t, width], zeros before the
        first token; None where the head reads no features."""
        rows = slice(max(0, start - 1), min(start + PROMPT_CHUNK, record.tokens) - 1)
        features = [record.features[site][rows].float() for site in self.section.feature_sites]
        if not features:
            return None
        before = torch.cat(features, -1)
        return before if start else torch.nn.functional.pad(before, (0, 0, 1, 0))

    def _most(self, bits: int, tokens: int, cap: Cap) -> int:
        """Keys of `bits` bits that are kept at most at so many tokens."""
        if not self.strict or cap(tokens) == float("inf"):
            return tokens
        each = self.section.kv_heads * bytes_per_vector(self.section.head_dim, bits)
        return max(1, min(tokens, int(self.share * cap(tokens) // each)))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def begin(self, ids: Tensor, tokens: int, notes: dict[str, Tensor], passing: dict[str, object], cap: Cap) -> None:
        """See `semkv.runtime.components.BeforeStep`."""
        ids, unread = ids.cpu(), notes[UNREAD]
        features = [notes[f"features.{site}"] for site in self.section.feature_sites]
        if not features:
            q, k = self._whole(ids, tokens, None)
        else:
            before = torch.cat(features, -1).float()
            q, k = self._whole(torch.cat([unread, ids[:1]]), tokens - len(unread), before)
            q = q[:, -1:]
            if len(ids) > 1:
                later, _ = self._whole(ids[1:], tokens + 1, before[-1:].expand(len(ids) - 1, -1))
                q = torch.cat([q, later], 1)
            notes[UNREAD] = ids[1:].clone()
        keyed = tokens + (len(ids) if not features else 1)
        bits = self._bits(notes)
        self._store(notes, self._packed(k, bits), self._most(bits, tokens + len(ids), cap))
        passing[RANKING] = self._ranking(q, notes, tokens, keyed - _keyed(notes))

    def _ranking(self, q: Tensor, notes: dict[str, Tensor], tokens: int, first: int) -> Ranking:
        grouped = q.unflatten(0, (self.held, -1))  # [Hkv, G, T, D]
        logits = self._products(grouped.flatten(1, 2), notes).unflatten(1, grouped.shape[1:3])  # [Hkv, G, T, m]
        if q.shape[1] > 1:
            asked = tokens + torch.arange(q.shape[1], dtype=torch.int64, device="cpu")
            logits = logits.masked_fill(
                first + torch.arange(logits.shape[3], dtype=torch.int64, device="cpu") > asked[:, None], float("-inf")
            )
        logs = group_scores(logits)
        if not self.batch:
            return Ranking(logs, first, self.heads, self.section.kv_heads)
        if self.ranks is not None:
            every = torch.full((self.section.kv_heads, *logs.shape[1:]), float("-inf"), dtype=logs.dtype, device="cpu")
            every[list(self.heads)] = logs
            logs = self.ranks.reduce(every, "max")
        return Ranking(logs.exp().mean(0, keepdim=True).log(), first)

    def _run(self, ids: Tensor, first: int, before: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Queries [Hq, t, D] and keys [Hkv, t, D] of ids [n] from position `first` on, a chunk at a time, where the head is; of own
        heads."""
        device = next(self.selector.buffers()).device
        for start in range(0, len(ids), PROMPT_CHUNK):
            part = slice(start, start + PROMPT_CHUNK)
            at = first + torch.arange(len(ids), dtype=torch.int64, device="cpu")[part]
            given = [x[None].to(device) for x in (ids[part], at, *([] if before is None else [before[part]]))]
            q, k = (x[0] for x in self.selector(*given))
            if self.heads:
                q = q.unflatten(0, (self.section.kv_heads, -1))[list(self.heads)].flatten(0, 1)
                k = k[list(self.heads)]
            yield q, k

    def _whole(self, ids: Tensor, first: int, before: Tensor | None) -> tuple[Tensor, Tensor]:
        parts = [(q.cpu(), k.cpu()) for q, k in self._run(ids, first, before)]
        return torch.cat([q for q, _ in parts], 1), torch.cat([k for _, k in parts], 1)

    def _bits(self, notes: dict[str, Tensor]) -> int:
        if not self.strict:
            return 16
        return 8 if notes[KEYS].shape[-1] == self.section.head_dim else 4

    def _packed(self, k: Tensor, bits: int) -> dict[str, Tensor]:
        """Keys k [Hkv, t, D] as they are kept."""
        if not self.strict:
            return {KEYS: k.to(torch.float16)}
        packed = quantize(k, bits)
        return {KEYS: packed.codes, SCALE: packed.scale}

    @staticmethod
    def _store(notes: dict[str, Tensor], new: dict[str, Tensor], most: int) -> None:
        """Add the packed keys of the next tokens, and keep the newest `most`."""
        for name, x in new.items():
            older, newest = notes.get(name, x[:, :0]), notes.get(f"{name}{NEWEST}", x[:, :0])
            newest = torch.cat([newest, x], 1)
            over = older.shape[1] + newest.shape[1] - most
            if over > 0 or newest.shape[1] >= JOINED:
                older, newest = torch.cat([older, newest], 1)[:, max(0, over) :].contiguous(), newest[:, :0].clone()
            notes[name], notes[f"{name}{NEWEST}"] = older, newest

    def _products(self, q: Tensor, notes: dict[str, Tensor]) -> Tensor:
        """q [Hkv, R, D] times the keys that are kept: float32 [Hkv, R, m]."""
        found = []
        for part in ("", NEWEST):
            keys = notes[f"{KEYS}{part}"]
            if not self.strict:
                found.append(scores(q, keys))
            else:
                scale = notes[f"{SCALE}{part}"]
                found.append(products(q, Quantized(keys, scale, self._bits(notes), self.section.head_dim)))
        return torch.cat(found, -1)


def _keyed(notes: dict[str, Tensor]) -> int:
    """Tokens with keys."""
    return notes[KEYS].shape[1] + notes[f"{KEYS}{NEWEST}"].shape[1]


def model_heads(site: AttentionSite, whole: AttentionSite) -> tuple[int, ...]:
    """The user's model's KV heads that `site` has, a part of the site `whole`."""
    order = whole.head_order or tuple(range(whole.kv_heads))
    return order[site.first_head : site.first_head + site.kv_heads]


def own_heads_of(logs: Tensor, ranking: Ranking, site: AttentionSite, whole: AttentionSite) -> Tensor:
    """logs [H, ...] of the ranking's KV heads, for those of `site`, a part of the site `whole`."""
    own, count = model_heads(site, whole), whole.whole.kv_heads
    if not ranking.heads:
        matched = matched_heads(logs, count)
        return matched[list(own)] if whole.head_order else matched[own[0] : own[-1] + 1]
    place = {head: at for at, head in enumerate(ranking.heads)}
    groups = matches(ranking.of, count)
    return torch.stack([logs[[place[head] for head in groups[own_head]]].amax(0) for own_head in own])


@dataclass(frozen=True)
class SpeculativeRouter(MeansSuffice):
    """Single tokens in the order of the ranking that `Speculation` left for this step: the same in every layer."""

    def score(self, site: AttentionSite, q: Tensor, spans: UnitsView, step: Step) -> Tensor:
        ranking, known = step.passing[RANKING], step.passing.setdefault(SCORES, {})
        assert isinstance(ranking, Ranking)
        assert isinstance(known, dict)
        start = spans.run_from
        if start is None or start < ranking.first:
            place = spans.positions[0].long() - ranking.first
            logs = ranking.logs[:, :, place.clamp(min=0)].masked_fill(place < 0, float("-inf"))
            return self._of_heads(logs, ranking, site, step)
        at = start - ranking.first
        asked = (at, spans.count, model_heads(site, step.site), site.group_size, step.site.whole.kv_heads)
        if asked not in known:  # the same for most layers
            known[asked] = self._of_heads(ranking.logs[:, :, at : at + spans.count], ranking, site, step)
        return known[asked]

    @property
    def of_tokens(self) -> bool:
        """See `semkv.runtime.components.OfTokens`."""
        return True

    def constants(self, site: AttentionSite) -> dict[str, Tensor]:
        """See `semkv.runtime.components.Scorer`."""
        return {}

    def bring(self, site: AttentionSite, step: Step, spans: UnitsView) -> Brought:
        """See `semkv.runtime.components.Bringer`: the ranking for the site's KV heads, which begins before or behind the first unit."""
        ranking, known = step.passing[RANKING], step.passing.setdefault(SCORES, {})
        assert isinstance(ranking, Ranking)
        assert isinstance(known, dict)
        skipped = spans.places.start + spans.places.shift - ranking.first
        asked = (skipped, model_heads(site, step.site), step.site.whole.kv_heads)
        if asked not in known:  # the same for most layers
            own = own_heads_of(ranking.logs[:, 0], ranking, site, step.site)
            count = own.shape[1]
            room = torch.full(
                (site.kv_heads, count + JOINED - count % JOINED), float("-inf"), dtype=torch.float32, device="cpu"
            )
            room[:, max(0, skipped) : count] = own[:, max(0, skipped) :]
            known[asked] = room
        return Brought({"ranking": known[asked]}, skipped)

    def scores(self, site: AttentionSite, q: Tensor, units: Units) -> Tensor:
        """See `semkv.runtime.components.Scorer`."""
        return units.tensors["ranking"][:, :, None]

    @staticmethod
    def _of_heads(logs: Tensor, ranking: Ranking, site: AttentionSite, step: Step) -> Tensor:
        """logs float32 [H, T, M] of the ranking's KV heads, for the query heads of a site."""
        return own_heads_of(logs, ranking, site, step.site).repeat_interleave(site.group_size, 0)

    def threshold(self, site: AttentionSite) -> Tensor:
        return torch.full((site.q_heads,), float("-inf"), dtype=torch.float32, device="cpu")
