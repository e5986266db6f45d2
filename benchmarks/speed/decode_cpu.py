"""A decode step on two CPU cores: semkv's methods beside Hugging Face's DynamicCache, in one process, over the floor of reading.

    python -m benchmarks.speed.decode_cpu  # everything, a quarter of an hour; needs a quiet machine and 20 GB
    python -m benchmarks.speed.decode_cpu --length 8192 --fixed 8192 --steps 3 --warmup 1 --out small.json  # that it runs
    python -m benchmarks.speed.decode_cpu --page  # the page alone, from the results that are there

The decoder has 8 layers, hidden 1024, 16 query and 8 KV heads of dim 128, an MLP of 2816, 4096 words, and random fp32 weights. Claims:

- at 64K tokens and 10 % of the KV, a step against DynamicCache with SDPA, and against our own `full`;
- at a budget of 4,096 tokens, a step at 128K tokens against one at 8K;
- the operator's reading of resident entries against the plain reading (a sum) of the same bytes, fp32 and bf16.

States are not prefilled but made of random keys and values of the length. What a profile would tell (sketches, a retrieval
head) is random as well: it takes the time of a trained one. Each contender takes --warmup steps and then --steps timed ones;
medians count. Twice on the same state: with what its own router chooses among random keys, where every step looks elsewhere, and with a
choice that overlaps with the step before as it does in text (--overlap; `replay.py`), at the price of the own one. The floor of a step is
the bytes that it must read (weights, and what the cache has on the device) over the bandwidth: the fastest plain reading of 256 MiB or of
the operator's entries, among those taken all through the run, as a shared machine is not always as fast.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import semkv
from benchmarks.lib.grids import measured_on, table, write_document
from benchmarks.lib.pages import Output
from benchmarks.lib.places import RESULTS
from benchmarks.lib.replay import overlapping
from semkv.artifact.fingerprint import model_fingerprint
from semkv.evaluation.environment import describe, now
from semkv.ir.ops import mixed_attention
from semkv.model.huggingface import CACHE
from semkv.profiles.calibration.calibrate import annotated_program, model_facts
from semkv.profiles.schema import Profile, ProfileInfo, SketchSection
from semkv.profiles.schema.retrieval_head import RetrievalHeadSection
from semkv.runtime.host.tier import HostTier
from semkv.runtime.prompt.record import RowRecord
from semkv.runtime.state import State

RESULT = RESULTS / "decode_cpu.json"
LAYERS, Q_HEADS, KV_HEADS, DIM, VOCAB, POSITIONS = 8, 16, 8, 128, 4096, 262_144
OPTIONS: dict[str, dict[str, Any]] = {
    "sekv": {"router": "coarse", "forms": "int8"},
    "sketch": {},
    "mixed": {"others": "window", "all_heads": True},
    "compresskv": {"recoverable": True, "selection": "all", "allocation": "uniform"},
    "sentencekv": {"buckets": "chunks", "query": "token"},
    "specontext": {"strict": True},
}
"""Of each method, what does without a trained profile."""
DROPPING = "compresskv, dropping"
"""The method as its paper has it: what is not kept is gone, and a step chooses nothing."""
CONTENDERS = OPTIONS | {DROPPING: {"selection": "all", "allocation": "uniform"}}
FIXED = 4096
SHORT, LONG = 8192, 131_072


@dataclass(frozen=True)
class Step:
    """A decode step of one contender: milliseconds, and bytes. budget: a fraction or tokens, None for all.

    read_bytes: weights and what the cache has on the device; floor_ms: the time to read them at the bandwidth.
    asked: the overlap that was replayed, None for the own choice; overlap: share of what a step unfolded that was there from the step
    before. full_ms: median of `full` in the same turns, 0 where it was not there.
    """

    name: str
    tokens: int
    budget: float | int | None
    median_ms: float
    p95_ms: float
    read_bytes: int
    floor_ms: float
    moved_bytes: float = 0.0
    overlap: float = 0.0
    asked: float | None = None
    full_ms: float = 0.0


@dataclass(frozen=True)
class Reading:
    """Bytes per second of the operator over n entries of one layer, beside the plain reading of the same tensors and what PyTorch
    has for it otherwise: SDPA for grouped queries, and two matrix products."""

    entries: int
    dtype: str
    threads: int
    operator: float
    plain: float
    share: float
    sdpa: float
    matmul: float


def build(layers: int = LAYERS) -> LlamaForCausalLM:
    """The decoder, or its first layers, with Hugging Face's SDPA attention."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=Q_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=POSITIONS,
        rope_theta=5e5,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def random_profile(model: LlamaForCausalLM) -> Profile:
    """A retrieval head and sketches of the right sizes."""
    head = RetrievalHeadSection(
        hidden=1024,
        q_heads=KV_HEADS,
        kv_heads=KV_HEADS,
        head_dim=32,
        parameters=1024 * 32 * 2 * KV_HEADS,
        whole=10_000_000,
    )
    layers = model.config.num_hidden_layers
    sketch = SketchSection(stages=4, caught=((1.0,) * KV_HEADS,) * layers)
    facts = model_facts(annotated_program(model), "random")
    shapes = head.tensor_shapes(facts) | sketch.tensor_shapes(facts)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.rand(shape, generator=generator) + 0.5
        if len(shape) < 3 and "head" not in name
        else torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    for name, shape in shapes.items():
        if name.startswith("sketch.root"):
            tensors[name] = torch.eye(shape[-1]).expand(shape).clone()
        elif "books" in name:
            tensors[name] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    info = ProfileInfo(fingerprint=model_fingerprint(model), model=facts, sketch=sketch, retrieval_head=head)
    return Profile(info, tensors)


def synthetic_record(tokens: int, layers: int = LAYERS, tier: HostTier | None = None) -> RowRecord:
    """What a prefill of `tokens` tokens leaves in `tier` (None: memory), of random numbers."""
    generator = torch.Generator().manual_seed(tokens)
    tier = HostTier() if tier is None else tier

    def draw(*shape: int) -> Tensor:
        return tier.empty(shape, torch.float32).normal_(generator=generator)

    return RowRecord(
        ids=torch.randint(1, VOCAB, (tokens,), generator=generator),
        keys={layer: draw(KV_HEADS, tokens, DIM) for layer in range(layers)},
        values={layer: draw(KV_HEADS, tokens, DIM) for layer in range(layers)},
        queries={layer: draw(Q_HEADS, 64, DIM) for layer in range(layers)},
        surprisal=draw(tokens).abs(),
        logits=draw(VOCAB),
    )


def timed(step: Callable[[], object], warmup: int, steps: int) -> list[float]:
    """Milliseconds of each of `steps` calls after `warmup` calls, ascending."""
    for _ in range(warmup):
        step()
    found = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        found.append(1000 * (time.perf_counter() - started))
    return sorted(found)


def plain_reading(tensors: list[Tensor], repeats: int) -> float:
    """Bytes per second of the sums of `tensors`, read as float32 numbers: the best of `repeats`."""
    views = [x.flatten().view(torch.float32) for x in tensors]
    best = min(timed(lambda: [x.sum() for x in views], 1, repeats))
    return sum(x.nbytes for x in tensors) / (best / 1000)


def _operator(q: Tensor, k: Tensor, v: Tensor, at: Tensor, where: Tensor) -> Tensor:
    return mixed_attention(q, at, [k], [v], [where], scale=DIM**-0.5)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, at: Tensor, where: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q.to(k.dtype), k, v, enable_gqa=True)


def _matmul(q: Tensor, k: Tensor, v: Tensor, at: Tensor, where: Tensor) -> Tensor:
    grouped = q.to(k.dtype).unflatten(1, (KV_HEADS, -1)).squeeze(3)
    return torch.softmax(grouped @ k.mT * DIM**-0.5, -1) @ v


def readings(entries: tuple[int, ...], repeats: int) -> Iterator[Reading]:
    """The operator's speed by number of entries, dtype and threads."""
    before = torch.get_num_threads()
    for count in entries:
        for dtype in (torch.float32, torch.bfloat16):
            k, v = (torch.randn(1, KV_HEADS, count, DIM).to(dtype) for _ in range(2))
            q, at, where = torch.randn(1, Q_HEADS, 1, DIM), torch.full((1, 1), count), torch.arange(count)[None, None]
            for threads in (1, 2):
                torch.set_num_threads(threads)
                plain = plain_reading([k, v], repeats)

                speeds = [
                    (k.nbytes + v.nbytes) / (min(timed(partial(run, q, k, v, at, where), 2, repeats)) / 1000)
                    for run in (_operator, _sdpa, _matmul)
                ]
                yield Reading(
                    count, str(dtype).removeprefix("torch."), threads, speeds[0], plain, speeds[0] / plain, *speeds[1:]
                )
    torch.set_num_threads(before)


@dataclass
class Contender:
    """A decode step of one state, and what was found of it. asked: the overlap that is replayed. times: in ms. moved, held: bytes."""

    name: str
    tokens: int
    budget: float | int | None
    step: Callable[[], object]
    resident: Callable[[], int]
    state: State | None = None
    asked: float | None = None
    times: list[float] = field(default_factory=list)
    moved: float = 0.0
    held: float = 0.0

    def warm(self, steps: int) -> None:
        """Untimed steps."""
        for _ in range(steps):
            self.step()

    def burst(self, steps: int) -> None:
        """Timed steps, after one that brings its own data to the caches."""
        self.warm(1)
        moved, held = self.traffic()
        for _ in range(steps):
            self.times += timed(self.step, 0, 1)
        moved_now, held_now = self.traffic()
        self.moved, self.held = self.moved + moved_now - moved, self.held + held_now - held

    def traffic(self) -> tuple[float, float]:
        """Bytes that the state's row moved, and those that it had from the step before, so far."""
        if self.state is None:
            return 0.0, 0.0
        found = self.state.rows[0].traffic
        return found.moved_bytes, found.held_bytes

    def overlap(self, share: float) -> None:
        """From now on, choose what overlaps so."""
        assert self.state is not None
        overlapping(self.state, share)
        self.asked = share


class Bench:
    """Contenders on one model; `bandwidth` in bytes per second, the fastest reading so far. What is compared takes turns, `BURST`
    steps each, so that what else the machine does meets both."""

    BURST = 4

    def __init__(self, warmup: int, steps: int, bandwidth: float) -> None:
        self.warmup, self.steps, self.bandwidth = warmup, steps, bandwidth
        self.probe = torch.randn(1 << 26)
        self.model = build()
        self.weights = sum(x.nbytes for x in self.model.parameters()) - self.model.model.embed_tokens.weight.nbytes
        config = semkv.CompileConfig(floor=0)
        self.full = semkv.compile(self.model, random_profile(self.model), method="full", config=config)
        self.found: list[Step] = []

    def hugging_face(self, record: RowRecord) -> Contender:
        """DynamicCache with SDPA."""
        cache = DynamicCache()
        for layer in range(LAYERS):
            cache.update(record.keys[layer][None], record.values[layer][None], layer)
        at, ids = record.tokens, torch.ones(1, 1, dtype=torch.int64)

        @torch.no_grad()
        def step() -> None:
            nonlocal at
            self.model(ids, position_ids=torch.full((1, 1), at), use_cache=True, **{CACHE: cache})
            at += 1

        resident = partial(sum, [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers])
        return Contender("DynamicCache", record.tokens, None, step, resident)

    def ours(self, method: str, record: RowRecord, budget: float | int | None, *, release: bool = False) -> Contender:
        """A compiled model of this method with a state of the record."""
        compiled = self.full
        if budget is not None:
            compiled = self.full.with_method(method.partition(",")[0], budget, **CONTENDERS[method])
        state = compiled.compress(record, release=release)
        ids = torch.ones(1, 1, dtype=torch.int64)
        return Contender(
            method,
            record.tokens,
            budget,
            partial(compiled.extend, state, ids),
            lambda: state.nbytes["device"],
            state,
        )

    def compare(self, *contenders: Contender) -> None:
        """Let them take turns, and keep what was found of those that are new."""
        self.bandwidth = max(self.bandwidth, plain_reading([self.probe], self.warmup))
        for one in contenders:
            one.times, one.moved, one.held = [], 0.0, 0.0
            one.warm(self.warmup)
        while len(contenders[0].times) < self.steps:
            for one in contenders:
                one.burst(min(self.BURST, self.steps))
        full = next((statistics.median(one.times) for one in contenders if one.name == "full"), 0.0)
        for one in contenders:
            times, read = sorted(one.times), self.weights + one.resident()
            step = Step(
                one.name,
                one.tokens,
                one.budget,
                statistics.median(times),
                times[min(len(times) - 1, int(0.95 * len(times)))],
                read,
                1000 * read / self.bandwidth,
                one.moved / len(times),
                one.held / max(1, one.moved + one.held),
                one.asked,
                full,
            )
            if all(_place(step) != _place(other) for other in self.found):
                self.found.append(step)
                show(step)
        gc.collect()


def _place(step: Step) -> tuple[Any, ...]:
    return step.name, step.tokens, step.budget, step.asked


def check(bench: Bench) -> None:
    """Refuse to report anything where `full` does not give the model's own logits on the same synthetic cache."""
    record = synthetic_record(300)
    cache = DynamicCache()
    for layer in range(LAYERS):
        cache.update(record.keys[layer][None], record.values[layer][None], layer)
    ids = torch.tensor([[7]])
    with torch.no_grad():
        wanted = bench.model(ids, position_ids=torch.tensor([[300]]), **{CACHE: cache}).logits[:, -1]
    got = bench.full.extend(bench.full.compress(record), ids)[:, -1]
    if not torch.allclose(got, wanted, rtol=1e-3, atol=1e-4):
        raise SystemExit("correctness check failed: `full` does not give the model's own logits; nothing is reported")


def show(step: Step) -> None:
    """One line of the table."""
    budget = "-" if step.budget is None else f"{step.budget:g}"
    print(
        f"{step.name:22}{step.tokens:>8}{budget:>8}{step.median_ms:>10.1f} ms{step.p95_ms:>10.1f} ms p95{step.floor_ms:>9.1f} ms floor"
        f"{step.moved_bytes / 2**20:>8.1f} MiB moved{100 * step.overlap:>5.0f} % there before",
        flush=True,
    )


def claims(found: list[Step], read: list[Reading], length: int) -> dict[str, float]:
    """The ratios that the three claims are about."""
    at = {_place(step): step for step in found}
    theirs, full = at["DynamicCache", length, None, None].median_ms, at["full", length, None, None].median_ms
    out = {"full: DynamicCache over it": theirs / full}
    for step in found:
        if step.tokens == length and step.budget == 0.1:
            out[f"{named(step)}: DynamicCache over it"] = theirs / step.median_ms
            out[f"{named(step)}: full over it"] = step.full_ms / step.median_ms
    for name in dict.fromkeys(named(step) for step in found if step.budget == FIXED):
        fixed = {step.tokens: step for step in found if step.budget == FIXED and named(step) == name}
        if len(fixed) > 1:
            short, long = fixed[min(fixed)], fixed[max(fixed)]
            out[f"{name}: longest over shortest at {FIXED} tokens"] = long.median_ms / short.median_ms
    for one in read:
        out[f"operator: share of reading, {one.entries} entries, {one.dtype}, {one.threads} threads"] = one.share
    return out


def named(step: Step) -> str:
    """A contender with its way of choosing."""
    return step.name if step.asked is None else f"{step.name}, {100 * step.asked:g} % overlap"


def judged(text: str, met: bool) -> str:
    """A figure of a table, in bold where it meets its bar."""
    return f"**{text}**" if met else text


def page(report: dict[str, Any]) -> Path:
    """docs/results/decode_cpu.md from the results."""
    found = [Step(**step) for step in report["steps"]]
    full, theirs = (next(step for step in found if step.name == name) for name in ("full", "DynamicCache"))
    fixed = [step for step in found if step.budget == FIXED]
    steps = [
        [
            named(step),
            f"{step.median_ms:.0f}",
            f"{step.floor_ms:.0f}",
            judged(f"{(ahead := theirs.median_ms / step.median_ms):.1f}", ahead >= (5 if step is full else 20)),
            judged(f"{(faster := step.full_ms / step.median_ms):.2f}", faster >= 4),
            f"{100 * step.overlap:.0f}",
        ]
        for step in found
        if step not in fixed
    ]
    lengths = sorted({step.tokens for step in fixed})
    flat = []
    for name in dict.fromkeys(named(step) for step in fixed):
        of = {step.tokens: step for step in fixed if named(step) == name}
        short, long = of[lengths[0]], of[lengths[-1]]
        flat.append(
            [
                name,
                *[f"{of[n].median_ms:.0f} ({100 * of[n].overlap:.0f} %)" for n in lengths],
                judged(f"{(longer := long.median_ms / short.median_ms):.2f}", longer <= 1.3),
            ]
        )
    read = [
        [
            f"{one['entries']:,}",
            one["dtype"],
            str(one["threads"]),
            *[f"{one[way] / 1e9:.1f}" for way in ("plain", "operator", "sdpa", "matmul")],
            judged(f"{100 * one['share']:.0f}", one["dtype"] == "float32" and one["share"] >= 0.6),
        ]
        for one in report["readings"]
    ]
    return write_document(
        "decode_cpu",
        "# A decode step on two CPU cores",
        "Made by `benchmarks/speed/decode_cpu.py`, all in one process: a decoder of 8 layers with 8 KV heads of 128 and random "
        "float32 weights, states of random keys and values. Medians of 20 steps, in milliseconds; on a shared machine ratios "
        "say more, and the two sides of each ratio alternate every few steps. "
        "`floor` is the time in which the bytes that a step must read can be read, at the fastest reading of the run. "
        "`there before`: share of a "
        "step's unfolded tokens that the step before had unfolded. A contender's own choice among random keys looks elsewhere in every "
        "step; with an overlap in its name it pays for that choice and then takes one that overlaps so, as text does. "
        f"`{DROPPING}` is the method as its paper has it: tokens that are not kept are gone, and no step chooses. The other methods fold "
        "them and choose in every step: `compresskv` with `recoverable`, `specontext` with `strict`.",
        f"## {full.tokens:,} tokens, 10 % of the KV",
        "Bars: 20 times faster than `DynamicCache` with SDPA and 4 times faster than our own `full`, which has to be 5 times "
        "faster than theirs. What meets its bar is in bold, here and below.",
        table(["", "step", "floor", "times DynamicCache", "times `full`", "there before, %"], steps),
        f"## A budget of {FIXED:,} tokens",
        "Bar: at most 1.3 times as long at the longer length, for `compresskv`, `sentencekv`, `specontext` and the best of "
        "the others, although scores of all units grow with the length. In brackets what was there before.",
        table(["", *[f"{n:,} tokens" for n in lengths], "ratio"], flat),
        "## What the operator reads, GB/s",
        "Bar: 60 % of a plain reading (a sum) of the same bytes in float32. Entries of 8 KV heads, read by 16 query "
        "heads; 6,554 of them fit partly into the processor's cache.",
        table(["entries", "stored as", "threads", "plain", "operator", "SDPA", "matmul", "share, %"], read),
        "## Provenance",
        measured_on(report["environment"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=65_536, help="tokens at which budgets of 10 %% are timed")
    parser.add_argument(
        "--fixed", default=f"{SHORT},{LONG}", help=f"lengths at which a budget of {FIXED} tokens is timed"
    )
    parser.add_argument("--entries", default="6554,65536", help="entries that the operator reads")
    parser.add_argument("--methods", default=";".join(CONTENDERS), help="separated by semicolons")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--overlap", type=float, default=0.95, help="share of a step's units that the step before had")
    output = Output(parser, RESULT, page)
    arguments = parser.parse_args()
    if output.page_alone(arguments):
        return
    started = now()
    read = list(readings(tuple(map(int, arguments.entries.split(","))), arguments.steps))
    for one in read:
        print(
            f"operator {one.entries:>7} {one.dtype:9} {one.threads} threads {one.operator / 1e9:6.2f} of {one.plain / 1e9:6.2f} GB/s"
        )
    most = max(one.entries for one in read)
    fastest = max(max(one.plain, one.operator) for one in read if one.entries == most)
    bench = Bench(arguments.warmup, arguments.steps, fastest)
    check(bench)
    methods = arguments.methods.split(";")
    record = synthetic_record(arguments.length)
    full = bench.ours("full", record, None)
    bench.compare(full, bench.hugging_face(record))
    for method in methods:
        one = bench.ours(method, record, 0.1)
        bench.compare(full, one)
        if method != DROPPING:
            one.overlap(arguments.overlap)
            bench.compare(full, one)
        del one
    del full, record
    for method in methods if arguments.fixed else ():
        lengths = map(int, arguments.fixed.split(","))
        pair = [bench.ours(method, synthetic_record(length), FIXED, release=True) for length in lengths]
        bench.compare(*pair)
        if method != DROPPING:
            for one in pair:
                one.overlap(arguments.overlap)
            bench.compare(*pair)
        del pair
    steps = [replace(step, floor_ms=1000 * step.read_bytes / bench.bandwidth) for step in bench.found]
    found = claims(steps, read, arguments.length)
    for name, value in found.items():
        print(f"{name:70}{value:8.2f}")
    report = {
        "environment": describe(started).model_dump(mode="json"),
        "bandwidth": bench.bandwidth,
        "steps": [asdict(step) for step in steps],
        "readings": [asdict(one) for one in read],
        "claims": found,
    }
    output.save(report, arguments.out)
    output.finish(arguments.out)


if __name__ == "__main__":
    main()
