"""The results of an evaluation as data: rows as they are measured, and the report made from them. JSON both ways."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from semkv.evaluation.settings import Cell, Variant
from semkv.evaluation.statistics import Estimate


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Answer(_Record):
    """One question's outcome.

    depth: of its evidence, None where it has none. matched: answer tokens that were right (the leading ones, or, where
    likelihood is measured, those that the model would have chosen), of `expected`. score: of a text that the model
    wrote, in [0, 1]; where likelihood is measured, the geometric mean probability of a token. text: what was written.
    nats: negative log-likelihood of the `expected` tokens; token_nats: of each. kl, agreed, compared: against the full cache on its
    own answer, see `semkv.evaluation.agreement`: the sum of the divergences in nats, and the tokens that would be the same, of so many.
    """

    correct: bool
    matched: int
    expected: int
    depth: float | None = None
    score: float | None = None
    text: str | None = None
    nats: float | None = None
    token_nats: list[float] | None = None
    kl: float | None = None
    agreed: int | None = None
    compared: int | None = None

    @property
    def value(self) -> float:
        """The score; 0 or 1 where answers are right or wrong."""
        return float(self.correct) if self.score is None else self.score


SHARES = (
    "device_share",
    "attended_share",
    "device_share_mean",
    "attended_share_mean",
    "excess_share",
    "excess_share_mean",
)
"""Fields of `Usage` that are shares of a layer's full KV."""


class Usage(_Record):
    """Memory and transfers of states, in bytes; of several, the one with the largest share of the full KV.

    device: largest residency of any step, unfolded spans included; the budget counts it. full: keys and values of all
    tokens at the end, the budget's denominator. budget_used: largest residency of a step over its cap, at most 1 where there is a budget
    and tokens that follow a prompt count towards it. device_share, attended_share: the largest part of its full KV that a layer held on
    the device, and that it read, in any step; device_share_mean, attended_share_mean: over layers and steps; excess_share,
    excess_share_mean: likewise, of what it held beyond its cap; None in reports from before they were measured.
    workspace: unfolded spans that stay between steps. host, disk: what waits there.
    reserved: device pages allocated ahead. window: sliding-window layers, which the budget does not count. moved: host
    to device, over `steps` forward calls.
    """

    device: int
    full: int
    budget_used: float
    device_share: float | None = None
    attended_share: float | None = None
    device_share_mean: float | None = None
    attended_share_mean: float | None = None
    excess_share: float | None = None
    excess_share_mean: float | None = None
    workspace: int
    host: int
    disk: int
    reserved: int
    window: int
    moved: float
    steps: int


class Zoom(_Record):
    """Share of spans unfolded over `steps` forward calls: per attention site, one number per query head."""

    sites: list[int]
    rates: list[list[float]]
    steps: int


class Mass(_Record):
    """Attention on far tokens (`semkv.evaluation.attention_mass`), summed over queries: per attention site, one number per query head.

    caught: on those that the memory read at full resolution. best: on as many, had they been the best. far: on all of them.
    """

    sites: list[int]
    caught: list[list[float]]
    best: list[list[float]]
    far: list[list[float]]

    @property
    def share(self) -> float:
        """Caught of what the best choice of as many tokens would hold, over all heads; 0 where there is none."""
        caught, best = (sum(map(sum, rows)) for rows in (self.caught, self.best))
        return caught / best if best else 0.0

    @property
    def of_all(self) -> float:
        """Caught of all far attention, over all heads."""
        caught, far = (sum(map(sum, rows)) for rows in (self.caught, self.far))
        return caught / far if far else 0.0


class Row(_Record):
    """What one variant did on one context: the unit that is stored and resumed."""

    cell: str
    context: int
    commit: str
    answers: list[Answer]
    usage: Usage
    step_us: list[float] = Field(description="time of each decode step, microseconds")
    compress_us: float = 0.0
    zoom: Zoom | None = None
    mass: Mass | None = None
    prompt_tokens: int


class Interval(_Record):
    """A value with its 95 % interval over contexts; without bounds where a single context gives none."""

    value: float
    low: float | None
    high: float | None
    samples: int
    contexts: int

    @classmethod
    def of(cls, estimate: Estimate) -> Interval:
        """An estimate as data; bounds that do not exist are None."""
        low, high = (None if math.isnan(x) else x for x in (estimate.low, estimate.high))
        return cls(value=estimate.value, low=low, high=high, samples=estimate.samples, contexts=estimate.clusters)


class DepthBin(_Record):
    """Accuracy of questions whose evidence lies in [start, stop) of the context."""

    start: float
    stop: float
    accuracy: Interval


class Timing(_Record):
    """Time of a decode step in microseconds over `steps` of them; empty where none was timed."""

    median: float | None
    p95: float | None
    steps: int


class Recovered(_Record):
    """Recovered gain, see `semkv.evaluation.gain`: over every predicted token, and over the far ones (None where there are none)."""

    every: Interval
    far: Interval | None
    tokens: int
    far_tokens: int


class Agreement(_Record):
    """Against the full cache on the same questions.

    kept: of the questions that the full cache gets right, the share that the method gets right too; None where there are none. kl: mean
    divergence of the next token's distribution from the full cache's, in nats, over the tokens of the full cache's answers; top1:
    share of these tokens that the method would write too. tokens: how many.
    """

    kept: Interval | None
    kl: Interval
    top1: Interval
    tokens: int


class CellResult(_Record):
    """One cell, aggregated.

    accuracy: mean score of the questions: the share of exact answers where answers are right or wrong.
    ratio: accuracy over the full cache's on the same questions of the same run; None where `full` was not run.
    perplexity: of all predicted tokens, where likelihood is measured. recovered: there, where `full` and `streaming_llm` at the same budget
    were run. agreement: where it was asked for. device_share: largest device bytes over full
    bytes.
    """

    cell: Cell
    accuracy: Interval
    perplexity: Interval | None = None
    recovered: Recovered | None = None
    agreement: Agreement | None = None
    ratio: Interval | None
    depths: list[DepthBin]
    usage: Usage
    device_share: float
    moved_per_step: float
    step_us: Timing
    zoom: Zoom | None = None
    mass: Mass | None = None


class Summary(_Record):
    """Mean over the families of one variant at one length and question mode; fields as in `CellResult`.

    families: those in the mean; where likelihood is measured beside other tasks, it stands apart. ahead: for each
    other variant at the same budget, by label, how much more of the same questions this one answers.
    """

    variant: Variant
    length: int
    question: Literal["unseen", "seen"]
    families: list[str]
    accuracy: Interval
    ratio: Interval | None
    ahead: dict[str, Interval] = Field(default_factory=dict)
    device_share: float
    moved_per_step: float
    step_us: Timing


class Environment(_Record):
    """Where and from what a result was made."""

    machine: str
    cpus: int
    threads: int
    accelerator: str | None
    python: str
    versions: dict[str, str]
    commit: str
    command: str
    started: str
    finished: str


class Report(_Record):
    """A whole evaluation."""

    schema_version: Literal[1] = 1
    title: str
    model: str
    complete: bool
    commits: list[str]
    environment: Environment
    cells: list[CellResult]
    summaries: list[Summary]
    notes: list[str] = Field(default_factory=list)
