"""Which memory a decoder takes on a machine in four ways to hold its KV, and the least that a decode step can take.

    full           all KV on the device
    full-offload   all KV on the host; each layer's crosses the link when it is its turn
    budget         semkv: `budget` on the device, the folded tokens on the host
    progressive    semkv with `offload="progressive"`: layers leave the device as the sequence grows (SpeContext Sec. 6, Alg. 1)

A step reads the weights and what it attends to once from device memory, and moves over the link what is not there; both may
overlap, so its floor is the larger of bytes over bandwidth. Arithmetic, launches and imperfect transfers come on top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from semkv.config import check_budget
from semkv.errors import BudgetError, ConfigError
from semkv.planning.decoder import Decoder
from semkv.planning.machine import Machine
from semkv.profiles.schema.memory import RUNTIME_SHARE, UNBOUNDED, MemoryDemand, offloaded_stores, thresholds
from semkv.runtime.host.pool import AHEAD

WAYS = ("full", "full-offload", "budget", "progressive")
FORMS = ("int8", "raw", "none")

UNFOLDED_SHARE = 1 / 2
"""Of the budget, what most folding methods leave for unfolded tokens at least by default: their `fixed_share` is one half (two thirds for
`shadowkv`, `infllm` and `sketch`), and often less is used, so that a step may move up to twice as much."""

MOST_ROWS = 1 << 20


@dataclass(frozen=True)
class Workload:
    """What is asked of the machine.

    tokens: of each row. rows: sequences at once. budget: a fraction of the full KV, tokens per KV head and layer, or None: only
    the two ways without one. form: in which folded tokens wait, `int8`, `raw`, or `none` where they are dropped.
    overlap: of what a step unfolds, the share that was unfolded by the step before and does not move.
    runtime: bytes of working memory, None: 0.3 of the weights (SpeContext Sec. 6.2). host: bytes of the host's memory, None:
    without limit.
    """

    tokens: int
    rows: int = 1
    budget: float | int | None = None
    form: str = "int8"
    overlap: float = 0.95
    runtime: int | None = None
    host: int | None = None

    def __post_init__(self) -> None:
        check_budget(self.budget)
        if self.tokens < 1 or self.rows < 1:
            raise ConfigError(f"context {self.tokens} and batch {self.rows}: expected at least one token and one row")
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"overlap {self.overlap}: expected a share in [0, 1]")
        if self.form not in FORMS:
            raise ConfigError(f"form {self.form!r} is not one of {', '.join(FORMS)}")


@dataclass(frozen=True)
class Way:
    """One way to hold the KV of the workload.

    device, host: bytes there. fits: both are within the machine's. read, moved: bytes that a step reads from device memory and
    moves from the host. device_seconds, link_seconds: those over the bandwidths. longest: tokens that fit at this batch; 0: none.
    most_rows: rows that fit at this length.
    layers_on_host: of the counted ones, those whose tokens wait on the host.
    """

    name: str
    device: int
    host: int
    fits: bool
    read: int
    moved: int
    device_seconds: float
    link_seconds: float
    longest: int
    most_rows: int
    layers_on_host: int

    @property
    def floor_seconds(self) -> float:
        """The least that a step takes: the larger of the two, which overlap."""
        return max(self.device_seconds, self.link_seconds)


@dataclass(frozen=True)
class MemoryPlan:
    """A decoder, a machine, a workload, and each way to run it. thresholds: of Alg. 1 at this batch; empty without a budget,
    where folded tokens are dropped, and where the device does not hold the weights."""

    decoder: Decoder
    machine: Machine
    workload: Workload
    ways: tuple[Way, ...]
    thresholds: tuple[int, ...]


@dataclass(frozen=True)
class _Bytes:
    """Of one way at one length and batch."""

    device: float
    host: float
    read: float
    moved: float
    layers: int


class Estimator:
    """The arithmetic: bytes of each way at any length and batch."""

    def __init__(self, decoder: Decoder, machine: Machine, workload: Workload) -> None:
        self.decoder, self.machine, self.workload = decoder, machine, workload
        counted = [layer for layer in decoder.layers if not layer.window]
        if workload.budget is not None and not counted:
            raise ConfigError(
                f"{decoder.name}: every layer keeps a sliding window only, so there is nothing for a budget to compress; plan it with "
                "--budget full"
            )
        itemsize = decoder.itemsize
        self.windows = [(layer.cached * itemsize, layer.window) for layer in decoder.layers if layer.window]
        self.cached = [layer.cached * itemsize for layer in counted]
        self.exact = tuple(layer.exact_bytes(itemsize) for layer in counted)
        self.waiting = tuple(layer.waiting_bytes(workload.form, itemsize) for layer in counted)
        self.runtime = workload.runtime if workload.runtime is not None else int(RUNTIME_SHARE * decoder.weights)

    def window_bytes(self, tokens: int) -> int:
        """Of one row's sliding-window layers."""
        return sum(size * min(tokens, window) for size, window in self.windows)

    def demand(self, tokens: int, rows: int) -> MemoryDemand:
        """Of progressive offload, with windows as long as `tokens` makes them; as `semkv.compiler.offload.offload_demand`."""
        assert self.workload.budget is not None
        ahead = AHEAD * sum(self.waiting)
        return MemoryDemand(
            weights=self.decoder.weights,
            runtime=self.runtime + rows * (ahead + self.window_bytes(tokens)),
            waiting=self.waiting,
            exact=self.exact,
            budget=self.workload.budget,
            rows=rows,
            beside=True,
        )

    def limits(self, rows: int) -> tuple[int, ...]:
        """Thresholds of Alg. 1 with full windows; none where the weights do not fit or nothing waits."""
        if self.workload.budget is None or not sum(self.waiting):
            return ()
        try:
            return thresholds(self.demand(UNBOUNDED, rows), self.machine.memory, self.workload.host)
        except BudgetError:
            return ()

    def bytes_of(self, way: str, tokens: int, rows: int) -> _Bytes | None:
        """None where progressive offload cannot hold so many tokens."""
        base, window = self.decoder.weights + self.runtime, rows * self.window_bytes(tokens)
        weights, cached = self.decoder.read_bytes(rows), sum(self.cached)
        if way == "full":
            kept = window + rows * tokens * cached
            return _Bytes(base + kept, 0, weights + kept, 0, 0)
        if way == "full-offload":  # one layer computes while the next arrives
            there = rows * tokens * cached
            buffers = rows * tokens * sum(sorted(self.cached)[-2:])
            return _Bytes(base + window + buffers, there, weights + window + there, there, len(self.cached))
        demand = self.demand(tokens, rows)
        selected = float(demand.selected(tokens))
        held = rows * selected * sum(self.exact)
        attended = selected if not sum(self.waiting) else self._unfolded(selected) + (1 - UNFOLDED_SHARE) * selected
        read = weights + window + rows * attended * sum(self.exact)
        if way == "budget":
            moved = rows * self._moved(tokens, selected, self.waiting)
            device, layers = base + window + held, len(self.waiting)
            return _Bytes(device, demand.host_bytes(tokens, layers), read, moved, layers)
        limits = self.limits(rows)
        if not limits or tokens > limits[-1]:
            return None
        layers = offloaded_stores(limits, tokens)
        moved = rows * self._moved(tokens, selected, self.waiting[len(self.waiting) - layers :])
        device = float(demand.device_bytes(tokens, layers))
        return _Bytes(device, demand.host_bytes(tokens, layers), read, moved, layers)

    def _unfolded(self, selected: float) -> float:
        """Tokens per KV head that a layer unfolds in a step."""
        return UNFOLDED_SHARE * selected

    def _moved(self, tokens: int, selected: float, waiting: tuple[int, ...]) -> float:
        """Bytes that cross the link for one row in a step, of layers whose folded tokens take `waiting` bytes."""
        return (1 - self.workload.overlap) * self._unfolded(selected) * sum(waiting)

    def fits(self, way: str, tokens: int, rows: int) -> bool:
        found = self.bytes_of(way, tokens, rows)
        if found is None or found.device > self.machine.memory:
            return False
        return self.workload.host is None or found.host <= self.workload.host

    def most_rows(self, way: str, tokens: int) -> int:
        """Rows of `tokens` tokens that fit."""
        return _largest(lambda rows: self.fits(way, tokens, rows), MOST_ROWS)

    def longest(self, way: str, rows: int) -> int:
        """Tokens that fit in each of `rows` rows."""
        return _largest(lambda tokens: self.fits(way, tokens, rows), UNBOUNDED)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, where all below it do; 0 where 1 does not."""
    if fits(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def ways_of(workload: Workload) -> tuple[str, ...]:
    """The ways that a workload has: without a budget the first two, without waiting tokens no progressive offload."""
    if workload.budget is None:
        return WAYS[:2]
    return WAYS[:3] if workload.form == "none" else WAYS


def plan_memory(decoder: Decoder, machine: Machine, workload: Workload) -> MemoryPlan:
    """Every way to run `workload`; raises `ConfigError` where a budget has nothing to compress."""
    estimator = Estimator(decoder, machine, workload)
    ways = tuple(_way(estimator, name) for name in ways_of(workload))
    return MemoryPlan(decoder, machine, workload, ways, estimator.limits(workload.rows))


def _way(estimator: Estimator, name: str) -> Way:
    workload, machine = estimator.workload, estimator.machine
    tokens, rows = workload.tokens, workload.rows
    found = estimator.bytes_of(name, tokens, rows)
    if found is None:  # too long for progressive offload: what it would take with every layer on the host
        every = len(estimator.waiting)
        budget = estimator.bytes_of("budget", tokens, rows)
        assert budget is not None
        device = float(estimator.demand(tokens, rows).device_bytes(tokens, every))
        found = _Bytes(device, budget.host, budget.read, budget.moved, every)
    return Way(
        name=name,
        device=round(found.device),
        host=round(found.host),
        fits=estimator.fits(name, tokens, rows),
        read=round(found.read),
        moved=round(found.moved),
        device_seconds=found.read / machine.bandwidth,
        link_seconds=found.moved / machine.link,
        longest=estimator.longest(name, rows),
        most_rows=estimator.most_rows(name, tokens),
        layers_on_host=found.layers,
    )
