"""Sentences as buckets: those whose mean key is nearest to the mean query of the sentence being generated are recalled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from semkv.errors import ConfigError
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.base import OncePerPrompt
from semkv.methods.options import FromOne, IndexBits, Queries, Share, Tokens, TokensOrNone, Width
from semkv.methods.page_routers import MeanKeyRouter, PageRouter
from semkv.methods.pages import DEFAULT_FRAME, Frame, Framed, page_lengths
from semkv.methods.sentences import START, advance, bucket_lengths, sentence_starts, state_behind
from semkv.methods.window_scores import observed_mass, pooled
from semkv.profiles.schema import Profile
from semkv.runtime.components import Brought, Components, Note, Plan
from semkv.runtime.decode.units import Units
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.step import Step
from semkv.runtime.store.segments import Segmentation
from semkv.runtime.views import UnitsView

MISSING = (
    "method 'sentencekv' needs a profile with sentences: make it with `semkv-profile MODEL --steps sentences -o OUT`, or run the "
    "ablation without it with method_options={'buckets': 'chunks', 'query': 'token'}"
)


@dataclass(frozen=True, eq=False)
class SentenceBuckets(Framed):
    """Buckets of what is kept of a prompt's middle; the first tokens and the window are exact.

    Of `keep` times the budget, `important` tokens of the prompt are retained, all with `keep` 0; a bucket's retained
    tokens are one unit, in as many segments as they have runs. Where the index of that many buckets does not fit, neighbours
    are joined. classes: uint8 [vocab], None: chunks of `longest` tokens. longest: tokens of a bucket. fixed_share: of the budget
    that the room of `segment` is. What units stand in behind a token is the state of the sentence machine there, for chunks how many
    tokens the last one has.
    """

    classes: Tensor | None
    keep: float = 3.0
    window: int = 32
    kernel: int = 7
    longest: int = 64
    fixed_share: float = 1 / 2
    frame: Frame = DEFAULT_FRAME

    per_store: ClassVar[bool] = True

    def segment(
        self, record: RowRecord, store: AttentionSite, room: float, unit_cost: float, page_size: int
    ) -> Segmentation:
        n = record.tokens
        sinks = min(self.frame.sinks, max(1, int(room / 4) // page_size * page_size))
        first, recent, left = Frame(sinks, self.frame.window, self.frame.share, self.frame.fold_chunk).fit(
            n, room, page_size
        )
        starts = torch.arange(first, recent, dtype=torch.int64, device="cpu")
        retained = torch.ones(recent - first, dtype=torch.bool, device="cpu")
        if self.keep:
            count = int(self.keep * room / self.fixed_share) - first - (n - recent)
            retained = self.important(store, record, first, recent, count)
        lengths = self.buckets(record.ids)
        bucket = torch.arange(len(lengths), dtype=torch.int64, device="cpu").repeat_interleave(lengths)[first:recent][
            retained
        ]
        most = max(1, int(left / unit_cost)) if unit_cost > 0 else n
        bucket = torch.unique(bucket, return_inverse=True)[1]  # numbered without gaps, in order
        while len(bucket) and int(bucket[-1]) + 1 > most:
            bucket = bucket // 2
        tokens = starts[retained]
        new = torch.ones(len(tokens), dtype=torch.bool, device="cpu")
        new[1:] = (torch.diff(tokens) > 1) | (torch.diff(bucket) > 0)
        edges = torch.nonzero(new)[:, 0]
        runs = torch.diff(edges, append=torch.tensor([len(tokens)], dtype=torch.int64, device="cpu"))
        return Segmentation(
            torch.arange(first, dtype=torch.int64, device="cpu"), tokens[new], runs, recent, bucket[new][None]
        )

    def important(self, store: AttentionSite, record: RowRecord, first: int, recent: int, count: int) -> Tensor:
        """bool [recent - first]: the `count` tokens that the prompt's last queries give most attention to, summed over all
        heads and max-pooled over neighbours."""
        mass = observed_mass(store, record, self.window)
        scores = pooled(mass[None], self.kernel, "max")[0, first:recent]
        best = scores.argsort(descending=True, stable=True)[: max(0, count)]
        return torch.zeros(recent - first, dtype=torch.bool, device="cpu").scatter(0, best, True)

    def buckets(self, ids: Tensor) -> Tensor:
        """Lengths int64 of the buckets of ids [n]."""
        if self.classes is None:
            return page_lengths(len(ids), self.longest)
        return bucket_lengths(sentence_starts(ids, self.classes)[0], self.longest)

    def segment_more(self, ids: Tensor, surprisal: Tensor, k: Tensor) -> Segmentation:
        return self.segment_on(0, ids)[0]

    def state_behind(self, ids: Tensor) -> int:
        return len(ids) % self.longest if self.classes is None else state_behind(ids, self.classes)

    def segment_on(self, state: int, ids: Tensor) -> tuple[Segmentation, bool, int]:
        if self.classes is None:
            begun = min(len(ids), self.longest - state) if state else 0
            rest = page_lengths(len(ids) - begun, self.longest)
            lengths = torch.cat([torch.tensor([begun], dtype=torch.int64, device="cpu"), rest]) if begun else rest
            return Segmentation.of_lengths(lengths), state > 0, (state + len(ids)) % self.longest
        starts, after = sentence_starts(ids, self.classes, state)
        return Segmentation.of_lengths(bucket_lengths(starts, self.longest)), not bool(starts[0]), after


@dataclass(frozen=True, eq=False)
class SentenceRouter(MeanKeyRouter):
    """Products of a unit's mean key with the mean query (Eq. 2) of the sentence so far, the new token's among them.

    classes: uint8 [vocab]; None: with each token's own query. A row remembers per site the sum of the sentence's queries, how
    many they are, and the state of the sentence machine.
    """

    classes: Tensor | None = None

    def bring(self, site: AttentionSite, step: Step, spans: UnitsView) -> Brought:
        """See `semkv.runtime.components.Bringer`: the sum of the sentence's queries, to which `scores` adds the token's, and one over their
        number."""
        if self.classes is None:
            return Brought({})
        name = f"sentence.{step.site.index}"
        made = step.passing.get(f"{name}.new")
        if made is None:  # once for all parts of a layer
            made = step.passing[f"{name}.new"] = self._advanced(name, step)
        assert isinstance(made, tuple)
        sums, told = made
        tensors = {"sentence.sum": sums[site.query_heads], "sentence.told": told}
        return Brought(tensors, written=("sentence.sum",))

    def _advanced(self, name: str, step: Step) -> tuple[Tensor, Tensor]:
        held, total = step.notes.get(name), step.notes.get(f"{name.replace('.', '.query.', 1)}")
        state, count = (START, 0) if held is None else held.tolist()
        state, starts = advance(state, int(self.classes[int(step.ids[0])]))
        count = 1 if starts else count + 1
        shape = (step.site.q_heads, step.site.key_dim)
        sums = torch.zeros(shape, dtype=torch.float32, device="cpu") if total is None or starts else total.clone()
        step.notes[name] = torch.tensor([state, count], dtype=torch.int64, device="cpu")
        step.notes[f"{name.replace('.', '.query.', 1)}"] = sums
        return sums, torch.tensor([1 / count], dtype=torch.float32, device="cpu")

    def scores(self, site: AttentionSite, q: Tensor, units: Units) -> Tensor:
        return super().scores(site, q if self.classes is None else mean_query(q, units), units)

    def score(self, site: AttentionSite, q: Tensor, spans: UnitsView, step: Step) -> Tensor:
        if self.classes is not None:
            q = self.sentence_queries(site, q, step)
        return PageRouter.score(self, site, q, spans, step)

    def sentence_queries(self, site: AttentionSite, q: Tensor, step: Step) -> Tensor:
        """For each of q [Hq, T, D] the mean over its sentence so far, float32; what is known goes into the notes."""
        held, total = step.notes.get(f"sentence.{site.index}"), step.notes.get(f"sentence.query.{site.index}")
        state, count = (START, 0) if held is None else held.tolist()
        sums = torch.zeros(q.shape[0], q.shape[2], dtype=torch.float32, device="cpu") if total is None else total
        queries, means = q.float().cpu(), []
        for place, token in enumerate(step.ids.tolist()):
            state, starts = advance(state, int(self.classes[token]))
            if starts:
                sums, count = torch.zeros_like(sums), 0
            sums, count = sums + queries[:, place], count + 1
            means.append(sums / count)
        step.notes[f"sentence.{site.index}"] = torch.tensor([state, count], dtype=torch.int64, device="cpu")
        step.notes[f"sentence.query.{site.index}"] = sums
        return torch.stack(means, 1)

    def notes(self, program: Program) -> dict[str, Note]:
        """What `sentence_queries` keeps."""
        if self.classes is None:
            return {}
        sites = [site for site in program.sites if site.treatment == "method"]
        found = {f"sentence.{site.index}": Note((2,), torch.int64) for site in sites}
        return found | {
            f"sentence.query.{site.index}": Note((site.q_heads, site.key_dim), torch.float32) for site in sites
        }


def mean_query(q: Tensor, units: Units) -> Tensor:
    """The mean of the sentence's queries, the token's q float32 [B, Hkv, G, D] among them, which is added to their sum."""
    sums = units.tensors["sentence.sum"]
    sums.add_(q.flatten(1, 2))
    return sums.view(q.shape) * units.tensors["sentence.told"].view(-1, 1, 1, 1)


@dataclass(frozen=True)
class SentenceKV(OncePerPrompt):
    """SentenceKV (Zhu et al., 2025): a prompt's sentences are buckets with a mean key each; while a sentence is generated its
    mean query ranks them, and the best are recalled until the budget tau is full. Needs a profile with sentences.

    r: of r * tau tokens that stay in the host tier, those that the prompt's end looks at most; the rest is dropped. window:
    observing queries. kernel: width of the max pooling, odd. query: `sentence` mean, or the current `token`'s alone. buckets:
    `sentences`, or `chunks` of `chunk` tokens. longest: tokens of a sentence, longer ones are split. sinks, recent: first
    and last tokens that stay exact. bits: of mean keys. fixed_share: of the budget, for these and the exact tokens.
    recoverable: nothing is dropped.
    """

    r: FromOne = 3.0
    window: Queries = 32
    kernel: Width = 7
    query: Literal["sentence", "token"] = "sentence"
    buckets: Literal["sentences", "chunks"] = "sentences"
    chunk: Tokens = 16
    longest: Tokens = 64
    sinks: TokensOrNone = 32
    recent: Tokens = 32
    bits: IndexBits = 8
    fixed_share: Share = 1 / 2
    recoverable: bool = False

    name: ClassVar[str] = "sentencekv"
    minimum_tokens: ClassVar[int] = 40

    def check(self, profile: Profile | None) -> None:
        needed = self.buckets == "sentences" or self.query == "sentence"
        if needed and (profile is None or profile.info.sentences is None):
            raise ConfigError(MISSING)

    def components(self, program: Program, profile: Profile | None) -> Components:
        self.check(profile)
        classes = None
        if profile is not None and profile.info.sentences is not None:
            classes = profile.tensors["sentences.classes"]
        frame = Frame(self.sinks, self.recent, share=1 / 4)
        segmenter = SentenceBuckets(
            classes if self.buckets == "sentences" else None,
            0.0 if self.recoverable else self.r,
            self.window,
            self.kernel,
            self.longest if self.buckets == "sentences" else self.chunk,
            self.fixed_share,
            frame,
        )
        return Components(
            segmenter=segmenter,
            router=SentenceRouter(self.bits, classes=classes if self.query == "sentence" else None),
            outside="folded",
            fixed_share=self.fixed_share,
            floor_tokens=32,
            window=self.recent,
            window_share=frame.share,
            fold_chunk=frame.fold_chunk,
        )

    def plan(self, program: Program, profile: Profile | None) -> Plan:
        plan = super().plan(program, profile)
        (components,) = plan.all_components()
        assert isinstance(components.router, SentenceRouter)
        return replace(plan, notes=components.router.notes(program))
