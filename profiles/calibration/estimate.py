"""What a calibration will take on this machine: a pass over one sample and a few pieces of work, timed and multiplied."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from semkv.ir.program import Program
from semkv.runtime.store.segments import Segmentation

from .codebooks import centroids
from .contexts import SiteRecord, candidates, record_of
from .generation import CachedReader
from .interpreter import SiteCall, full_attention, run_body
from .layer import layer_output
from .measure import Subject
from .metrics import caught_counts
from .parameters import RouterParameters
from .retrieval_head import Distillation
from .segmentation import Divider
from .steps import SEKV, Job, program_of
from .train import SETTLING, Lesson, router_terms
from .weights import weight_blocks

Clock = Callable[[], float]

PIECE = 512
"""Tokens that are read before a step of decoding is timed."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of each step, the most bytes that the process will hold, and what the pieces took."""

    seconds: dict[str, float]
    peak_bytes: int
    passes: Passes


@dataclass(frozen=True)
class Passes:
    """Seconds of a pass over `length` tokens: those that grow with the length, and attention's, which grow with its square. look: of the
    attention weights of all decode steps in all sites. decode: of one more token."""

    length: int
    rest: float
    attention: float
    look: float
    decode: float

    def seconds(self, tokens: int) -> float:
        """Of a pass over so many tokens."""
        share = tokens / self.length
        return self.rest * share + self.attention * share**2


def estimate(
    job: Job,
    steps: Sequence[str],
    report: Callable[[str], None] = lambda _: None,
    clock: Clock = time.monotonic,
    processes: int = 1,
) -> Estimate:
    """Probe this machine and say what `steps` will take. report: called with what is timed next. clock: `time.process_time` tells what
    it would take on a machine that does nothing else. processes: share the samples and the sites, each on cores of its own."""
    report("a pass over one sample")
    program = program_of(job)
    passes, call = _time_passes(job, program, clock)
    seconds: dict[str, float] = {}
    extra = [0]
    settings, data = job.measure_settings, job.measure_data
    for step in steps:
        report(step)
        if step == SEKV:
            seconds[step], room = _sekv(job, program, passes, call, clock, processes)
            extra.append(room)
            continue
        assert data is not None
        one, held = passes.seconds(settings.length + settings.steps), -(-len(data.held_out) // processes)
        samples = -(-len(data.measured) // processes)
        if step in ("taxonomy", "layer-errors"):
            seconds[step] = (samples if step == "taxonomy" else held) * (one + passes.look)
        elif step == "memory":
            seconds[step] = one
        elif step == "sentences":
            seconds[step] = 0.01 * samples
        elif step == "sketch":
            learned, room = _codebooks(job, program, clock)
            read = samples + -(-len(data.records) // processes) + held
            seconds[step] = read * one + learned / processes + 5 * held * passes.look
            extra.append(room)
        elif step == "retrieval-head":
            reads = samples * settings.head_rounds
            steps_taken = len(data.measured) * settings.head_rounds * settings.head_steps  # each process takes all
            seconds[step] = (reads + held) * (one + passes.look) + steps_taken * _head_step(job, program, clock)
        else:
            seconds[step] = (
                sum(
                    passes.seconds(len(test.context))
                    + sum(passes.decode * (2 + len(question.answer)) for question in test.questions)
                    for test in data.needles
                )
                / processes
            )
    return Estimate(seconds, _peak() + max(extra), passes)


def _peak() -> int:
    """The largest resident set of this process so far, bytes; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used << 10


def _timed(clock: Clock, work: Callable[[], object], times: int = 1) -> float:
    started = clock()
    for _ in range(times):
        work()
    return (clock() - started) / times


def _sample(job: Job) -> Tensor:
    """The ids of one sequence of the asked length."""
    if job.measure_data is not None:
        return job.measure_data.measured[0][1]
    assert job.data is not None
    return job.data.training[0]


def _time_passes(job: Job, program: Program, clock: Clock) -> tuple[Passes, SiteCall]:
    """The times of a pass, and the call of the last site that a method may compress."""
    device = next((p.device for p in program.body.parameters()), torch.device("cpu"))
    ids = _sample(job).to(device)
    calls: dict[int, SiteCall] = {}
    spent = [0.0]
    served = [site.index for site in program.sites if site.treatment == "method"]

    def attend(call: SiteCall) -> Tensor:
        started = clock()
        output = full_attention(call)
        spent[0] += clock() - started
        if call.site == served[-1]:
            calls[call.site] = call
        return output

    with torch.no_grad():
        positions = torch.arange(len(ids), dtype=torch.int64, device=device)
        whole = _timed(clock, lambda: run_body(program.body, ids, positions, attend))
        call = calls[served[-1]]
        count = min(job.measure_settings.steps, len(ids) // 2)
        block = job.measure_settings.block
        look = _timed(clock, lambda: [w.topk(1) for _, w in weight_blocks(call, len(ids) - count, block)])
        reader = CachedReader(program, PIECE + 8)
        reader.read(ids[:PIECE])
        decode = _timed(clock, lambda: reader.read(ids[:1]), 4)
    return Passes(len(ids), whole - spent[0], spent[0], look * len(served), decode), call


def _codebooks(job: Job, program: Program, clock: Clock) -> tuple[float, int]:
    """Seconds of learning all codebooks, and bytes that keys and values of all sites take meanwhile."""
    settings = job.measure_settings
    sites = [site for site in program.sites if site.treatment == "method"]
    count, heads = settings.sketch_vectors, sum(site.kv_heads for site in sites)
    generator = torch.Generator(device="cpu").manual_seed(0)
    dim = max(site.key_dim for site in sites)
    directions = settings.directions(dim)
    x = torch.randn(1, count, directions, generator=generator, dtype=torch.float32, device="cpu")
    once = _timed(clock, lambda: centroids(x, 1, generator), 2)
    held = sum(site.kv_heads * (site.key_dim + site.value_dim) for site in sites) * 2 * count
    wider = max(site.value_dim for site in sites) / directions
    books = settings.key_bytes(dim) + wider * settings.sketch_value_stages
    return once * heads * books * (settings.sketch_rounds + 1), held


def _head_step(job: Job, program: Program, clock: Clock) -> float:
    """Seconds of an optimiser step of the retrieval head."""
    assert job.measure_data is not None
    head = Distillation(Subject(program, job.measure_data, job.measure_settings))
    from .measure import Sums

    head._start(Sums())
    ids = _sample(job)
    n = len(ids)
    features = head.section.features
    given = torch.zeros(n, features, dtype=torch.float32, device=head.embedding.device) if features else None
    part = max(1, job.measure_settings.steps // job.measure_settings.head_steps)
    rows = torch.arange(n - part, n, dtype=torch.int64, device=head.embedding.device)
    return _timed(clock, lambda: head._scores(ids, given, rows).sum().backward())


def _sekv(
    job: Job, program: Program, passes: Passes, call: SiteCall, clock: Clock, processes: int
) -> tuple[float, int]:
    """Seconds of the records and of the training of all sites, and bytes of a site's records and of the keys and values of a context."""
    settings, data = job.settings, job.data
    assert data is not None
    sites = [site for site in program.sites if site.treatment == "method"]
    site = next(site for site in sites if site.index == call.site)
    n = call.k.shape[1] - settings.queries
    surprisal = torch.rand(n, generator=torch.Generator(device="cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    cut: Segmentation = Divider(program, settings)(surprisal, settings.budgets[0])
    at = candidates(n, settings.queries).to(call.k.device)
    asked = replace(call, q=call.q[:, at], positions=call.positions[at])
    made: list[SiteRecord] = []
    fold = _timed(clock, lambda: made.append(record_of(asked, n, cut, surprisal.to(call.k.device), settings)))
    record = made[0].to(call.k.device)
    lesson = Lesson.of(record, settings)
    parameters = RouterParameters(site, settings).to(call.k.device)
    rows = torch.arange(min(settings.batch, len(record.where)), dtype=torch.int64, device=call.k.device)
    step = _timed(
        clock,
        lambda: torch.stack(list(router_terms(parameters, lesson, rows, 0, settings).values())).sum().backward(),
        2,
    )
    judged = _timed(clock, lambda: caught_counts(parameters, record, settings))
    whole = _timed(
        clock,
        lambda: layer_output(record, None, torch.arange(len(record.where), dtype=torch.int64, device=call.k.device)),
    )
    contexts = len(data.training) + len(data.held_out)
    evaluations = settings.max_steps // settings.evaluation_interval + 2
    each = (
        settings.max_steps * step
        + evaluations * len(data.held_out) * judged
        + contexts * (whole + judged)
        + 4 * SETTLING * whole
    )
    held = contexts * sum(x.nbytes for x in made[0].tensors().values())
    cache = sum(s.values_per_token for s in sites) * call.k.shape[1] * call.k.element_size()
    turns, layers = (-(-count // processes) for count in (contexts, len(sites)))
    return turns * (passes.seconds(n) + len(sites) * fold) + layers * each, held + cache


__all__ = ["Estimate", "estimate"]
