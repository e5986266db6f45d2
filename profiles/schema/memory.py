"""The memory model of SpeContext (Sec. 6, Eq. 6-8, Alg. 1): device bytes by length, and from which lengths layers wait on the host."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from pydantic import Field, model_validator

from semkv.errors import BudgetError

from .facts import MAX_SITES, ModelFacts, Section

RUNTIME_SHARE = 0.3
"""Working memory beside the weights, as a share of them (Sec. 6.2): what stands in for a measurement."""

UNBOUNDED = 1 << 40
"""The threshold, in tokens, of a memory that no length fills."""

Bytes = Annotated[int, Field(ge=0, le=1 << 60)]
Tokens = Annotated[int, Field(ge=0, le=UNBOUNDED)]


@dataclass(frozen=True)
class MemoryDemand:
    """What a model and a workload ask of the device.

    Attributes
    ----------
    weights: bytes of the model and of its retrieval head, M_O + M_D. runtime: bytes of working memory beside them.
    waiting: for each KV store whose tokens may wait on the host, in order of execution, the bytes of one token there.
    exact: the same at full resolution, as the device holds what was selected.
    staying: bytes per token that never leave the device: the retrieval head's keys, half of a layer, and the buffer of
        repeated heads, as many layers as a group has query heads (alpha).
    budget: B, tokens per KV head and layer that a step selects, or a fraction of the sequence. floor: tokens that a step may select
        where a fraction is less.
    rows: R, sequences at once.
    beside: whether a store on the device holds its budget (exact tokens, indexes, what is unfolded) beside the tokens that
        wait there, as this runtime does; else it holds each token once, as in Eq. 7.
    """

    weights: int
    runtime: int
    waiting: tuple[int, ...]
    exact: tuple[int, ...]
    budget: int | float
    staying: int = 0
    rows: int = 1
    beside: bool = False
    floor: int = 0

    def __post_init__(self) -> None:
        if not self.beside and self.waiting != self.exact:
            raise ValueError("tokens that wait in another form than the device reads are held beside what was selected")

    def selected(self, tokens: int) -> Fraction:
        """Tokens per KV head and layer that a step selects of a sequence."""
        if isinstance(self.budget, int):
            return Fraction(min(tokens, self.budget))
        return max(Fraction(self.budget) * tokens, Fraction(min(tokens, self.floor)))

    def slopes(self, offloaded: int) -> tuple[int, int]:
        """Bytes per token of the sequence, and per selected token, of one row whose last `offloaded` stores wait on the host."""
        there = len(self.waiting) - offloaded
        budgeted = self.exact if self.beside else self.exact[there:]
        return self.staying + sum(self.waiting[:there]), sum(budgeted)

    def row_bytes(self, tokens: int, offloaded: int) -> Fraction:
        """Device bytes of one row's KV (the second summand of Eq. 7 for R = 1)."""
        every, selected = self.slopes(offloaded)
        return every * tokens + selected * self.selected(tokens)

    def device_bytes(self, tokens: int, offloaded: int) -> Fraction:
        """Eq. 7, and Eq. 6 where `offloaded` is 0: all that is on the device."""
        return self.weights + self.runtime + self.rows * self.row_bytes(tokens, offloaded)

    def host_bytes(self, tokens: int, offloaded: int) -> int:
        """Bytes of what waits on the host."""
        return self.rows * tokens * sum(self.waiting[len(self.waiting) - offloaded :])

    def longest(self, device: int, offloaded: int) -> int:
        """The most tokens at which `device` bytes hold what Eq. 7 counts; 0 where they do not hold one."""
        free = Fraction(device - self.weights - self.runtime, self.rows)
        if free < 0:
            return 0
        every, selected = self.slopes(offloaded)
        most = (
            self.budget if isinstance(self.budget, int) else self.floor
        )  # selected tokens while a longer row selects no more
        short = _whole(free, every + selected)
        if short >= most:
            short = max(most, _whole(free - selected * most, every))
        if isinstance(self.budget, int) or short * Fraction(self.budget) < most:
            return short
        return _whole(free, every + selected * Fraction(self.budget))


def _whole(free: Fraction, slope: Fraction | int) -> int:
    return min(UNBOUNDED, int(free / slope)) if slope else UNBOUNDED


def thresholds(demand: MemoryDemand, device: int, host: int | None = None) -> tuple[int, ...]:
    """Alg. 1: for i = 0 to L, the longest sequence at which `device` bytes suffice when the last i stores wait on the host.

    They do not fall. A store waits from one token above its threshold on (Sec. 6.2, Alg. 2); no sequence longer than the last
    one is possible. Where `host` bytes are given, no threshold lies above the length at which they are full.

    Raises
    ------
    BudgetError: the device does not hold the weights, their working memory and one token of each row.
    """
    found = [demand.longest(device, offloaded) for offloaded in range(len(demand.waiting) + 1)]
    if not found[-1]:
        needed = -(-demand.device_bytes(1, len(demand.waiting)) // 1)
        raise BudgetError(
            f"device memory of {device:,} bytes: the weights ({demand.weights:,} bytes), their working memory "
            f"({demand.runtime:,}) and one token of {demand.rows} row(s) take {int(needed):,}; use a device with more memory"
        )
    if host is None:
        return tuple(found)
    each = [demand.host_bytes(1, offloaded) for offloaded in range(len(found))]
    most = max(min(length, host // size if size else UNBOUNDED) for length, size in zip(found, each))
    return tuple(min(length, most) for length in found)


def offloaded_stores(limits: tuple[int, ...], tokens: int) -> int:
    """How many stores wait on the host at `tokens` tokens (Alg. 2).

    Raises
    ------
    BudgetError: the sequence is longer than the last of the thresholds `limits`.
    """
    for offloaded, limit in enumerate(limits):
        if tokens <= limit:
            return offloaded
    raise BudgetError(
        f"a sequence of {tokens} tokens does not fit: with every layer's KV on the host the device holds {limits[-1]} tokens; "
        "use more device memory, a smaller budget or fewer rows"
    )


class MemoryModel(Section):
    """The constants of Eq. 6-8 for this model and machine, and the thresholds of Alg. 1 that follow from them.

    Attributes
    ----------
    parameter_bytes: M_O. retrieval_bytes: M_D, 0 without a retrieval head.
    prefill_bytes, decode_bytes: the largest sum of intermediate values that were alive at once beside the weights, in one pass over
        `tokens` tokens and in one over a single token.
    token_bytes: for each KV store that a method may compress, in order, the keys and values of one token.
    group_size: alpha, query heads of a KV head. retrieval_token_bytes: keys of the retrieval head per token: half a layer.
    device_bytes, host_bytes: of the machine that thresholds are for; host None: without limit. rows: R. budget: B in tokens.
    thresholds: S^T_0 to S^T_L in tokens; `UNBOUNDED` stands for no limit.
    """

    parameter_bytes: Bytes
    retrieval_bytes: Bytes = 0
    prefill_bytes: Bytes
    decode_bytes: Bytes
    tokens: int = Field(ge=1)
    token_bytes: tuple[Annotated[int, Field(ge=1, le=1 << 40)], ...] = Field(min_length=1, max_length=MAX_SITES)
    group_size: int = Field(ge=1)
    retrieval_token_bytes: Bytes = 0
    device_bytes: Bytes
    host_bytes: Bytes | None = None
    rows: int = Field(default=1, ge=1)
    budget: int = Field(ge=1)
    thresholds: tuple[Tokens, ...] = Field(min_length=1, max_length=MAX_SITES + 1)

    @property
    def runtime_bytes(self) -> int:
        """Working memory: the paper's share of the weights, or what was measured where that is more."""
        return max(
            int(RUNTIME_SHARE * (self.parameter_bytes + self.retrieval_bytes)), self.prefill_bytes, self.decode_bytes
        )

    @property
    def demand(self) -> MemoryDemand:
        """Eq. 6-7 with these constants, each token held once."""
        repeated = self.group_size * max(self.token_bytes)
        return MemoryDemand(
            weights=self.parameter_bytes + self.retrieval_bytes,
            runtime=self.runtime_bytes,
            waiting=self.token_bytes,
            exact=self.token_bytes,
            budget=self.budget,
            staying=self.retrieval_token_bytes + repeated,
            rows=self.rows,
        )

    @classmethod
    def measured(cls, **constants: Any) -> MemoryModel:
        """The section whose thresholds follow from its other fields; raises as `thresholds` does."""
        blank = cls.model_construct(**constants)
        return cls(**constants, thresholds=thresholds(blank.demand, blank.device_bytes, blank.host_bytes))

    @model_validator(mode="after")
    def _thresholds_follow(self) -> MemoryModel:
        try:
            expected = thresholds(self.demand, self.device_bytes, self.host_bytes)
        except BudgetError as error:
            raise ValueError(str(error)) from None
        if self.thresholds != expected:
            raise ValueError(f"thresholds {self.thresholds} do not follow from the constants, which give {expected}")
        return self

    def check(self, model: ModelFacts) -> None:
        """Raise `ValueError` unless there is one entry per KV store that a method may compress."""
        counted = {site.store for site in model.method_sites}
        if len(self.token_bytes) != len(counted):
            raise ValueError(
                f"memory_model.token_bytes has {len(self.token_bytes)} entries for {len(counted)} KV stores"
            )
