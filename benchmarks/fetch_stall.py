"""How long decode steps stand still for folded tokens, with and without fetching ahead: RAM and disk, by step-to-step overlap.

    python benchmarks/fetch_stall.py                                   # everything; needs a quiet machine, 12 GB and 3 GB of disk
    python benchmarks/fetch_stall.py --layers 2 --tokens 8192 --steps 4 --warmup 1 --out small.json     # that it runs
    python benchmarks/fetch_stall.py --page                            # the page alone, from the results that are there

The decoder of `decode_cpu.py` at 32K tokens with a budget of 10 %, its folded tokens in pages of 16, chosen by a replayed trace: per
layer and KV head each page has a score that drifts from step to step (an autoregressive walk), and the highest are unfolded. The
drift is set so that the asked share of a step's pages was unfolded by the step before; pages enter and leave around the cut, as they
do where a query turns. Three ways on one state, one after the other:

- off: a step fetches what it lacks;
- likely: a thread fetches, two layers ahead, the pages below the cut of the layer's last step;
- known: the same thread fetches exactly what the layer will lack, as with a retrieval head, whose choice is there before the first layer.

Tiers: RAM (raw float32, and 8-bit codes that a fetch unpacks), and files on the disk whose pages are put out of the page cache before
every step (MADV_PAGEOUT, outside of the timed part; the share that stayed is printed): the coldest that it can be. `stall` is the
time in which a step waits for a fetch under way or fetches itself, in % of the step: medians. Claim: with 95 % overlap at most 5 %, and
at most half of what it is without. Nothing is reported unless the three ways give the same logits, bit by bit. The bundled model's own
hits are printed beside that: its steps are whole words, so that far less of a step was there before.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from decode_cpu import build, synthetic_record
from grids import measured_on, table, write_document
from pages import Output
from replay import drift_for, walk
from torch import Tensor

import semkv
from semkv import bundled
from semkv.compiled import CompiledModel
from semkv.config import CompileConfig
from semkv.evaluation.bench import time_compiled
from semkv.evaluation.environment import describe, now
from semkv.ir.program import Program
from semkv.ir.site import AttentionSite
from semkv.methods.base import Method
from semkv.methods.pages import Frame, Pages
from semkv.methods.routers import MeansSuffice
from semkv.pipeline import captured_program
from semkv.profiles.bundled.tasks import make_text
from semkv.profiles.schema import Profile
from semkv.runtime.components import Components
from semkv.runtime.host_tier import on_disk
from semkv.runtime.spans import FoldedSpans
from semkv.runtime.state import State
from semkv.runtime.step import Step

RESULTS = Path(__file__).resolve().parent / "results" / "fetch_stall.json"
WAYS = ("off", "likely", "known")
TIERS = {"ram, raw": ("ram", "raw"), "ram, int8": ("ram", "int8"), "disk, int8": ("disk", "int8")}
TEXT, MOST, LEAST = 0.95, 0.05, 2
"""The claim: at this overlap a stall is at most this share of the step, and this many times less than without fetching ahead."""
PAGE, BUDGET, FRAME = 16, 0.1, Frame(4, 64)
PAGEOUT = 21
"""MADV_PAGEOUT of Linux, which Python's mmap does not name."""
SYNC = 4
"""MS_SYNC."""
libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Stall:
    """Steps of one way: medians in milliseconds; share: of the step's time. cold: share of the waiting tokens' pages that were still in the
    page cache when a step began, None in RAM."""

    tier: str
    asked: float
    way: str
    overlap: float
    hit_rate: float
    step_ms: float
    stall_ms: float
    share: float
    moved_bytes: float
    ahead_bytes: float
    cold: float | None


@dataclass(eq=False)
class Replay(MeansSuffice):
    """A router whose scores were drawn beforehand: scores[step][store] [Hkv, M]; pages that are folded later are never chosen."""

    scores: list[dict[int, Tensor]] = field(default_factory=list)
    first: int = 0

    def score(self, site: AttentionSite, q: Tensor, spans: FoldedSpans, step: Step) -> Tensor:
        drawn = self.scores[step.tokens - self.first][site.store]
        drawn = torch.nn.functional.pad(drawn, (0, spans.count - drawn.shape[1]), value=float("-inf"))
        return drawn.repeat_interleave(site.group_size, 0)[:, None].expand(-1, q.shape[1], -1)

    def threshold(self, site: AttentionSite) -> Tensor:
        return torch.full((site.q_heads,), float("-inf"))


@dataclass(eq=False)
class KnownReplay(Replay):
    """One whose choice is known before the first layer."""

    def foresees(self, site: AttentionSite, step: Step) -> bool:
        return True


@dataclass(frozen=True)
class Replayed(Method):
    """Pages of equal size, chosen by a replayed trace."""

    form: str = "raw"

    name: ClassVar[str] = "replayed"
    minimum_tokens: ClassVar[int] = 40

    def components(self, program: Program, profile: Profile | None) -> Components:
        return Components(
            segmenter=Pages(PAGE, FRAME),
            router=Replay(),
            host_form=self.form,
            outside="folded",
            fixed_share=1 / 2,
            floor_tokens=32,  # type: ignore[arg-type]
            window=FRAME.window,
            window_share=FRAME.share,
            fold_chunk=PAGE,
        )


class Bench:
    """One decoder; a state per tier, which the three ways go on with in turn."""

    def __init__(self, layers: int, tokens: int, warmup: int, steps: int, folder: str | None) -> None:
        self.layers, self.tokens, self.warmup, self.steps, self.folder = layers, tokens, warmup, steps, folder
        self.program = captured_program(build(layers))

    def compiled(self, tier: str) -> CompiledModel:
        """The decoder with a method that replays, its folded tokens in `tier`."""
        host, form = TIERS[tier]
        folder = self.folder if host == "disk" else None
        config = CompileConfig(floor=0, host=host, disk_folder=folder, prefetch=False)  # type: ignore[arg-type]
        return CompiledModel(self.program, None, Replayed(form), BUDGET, config)

    def trace(self, state: State, overlap: float) -> list[dict[int, Tensor]]:
        """Scores for as many steps as a way takes."""
        row = state.rows[0]
        memories = {store: parts[0] for store, parts in row.stores.items()}
        generator = torch.Generator().manual_seed(round(1000 * overlap))
        count = self.warmup + self.steps
        out: list[dict[int, Tensor]] = [{} for _ in range(count)]
        for store, memory in memories.items():
            (room,) = row.workspace_allowance(row.placement.stores[store], row.tokens)
            chosen = int(memory.unfolded_tokens(room) / memory.site.kv_heads / PAGE)
            pages = memory.spans.count
            kept = drift_for(overlap, pages, chosen)
            for step, scores in enumerate(walk(count, memory.site.kv_heads, pages, kept, generator)):
                out[step][store] = scores
        return out

    def run(self, compiled: CompiledModel, state: State, scores: list[dict[int, Tensor]], way: str) -> list[Tensor]:
        """The logits of as many steps as scores were drawn for, by one way."""
        switch(compiled, state, scores, way)
        ids = torch.ones(1, 1, dtype=torch.int64)
        out = []
        for _ in scores:
            compiled.extend(state, ids)
            out.append(state.logits.clone())
        return out

    def check(self) -> None:
        """Refuse to report anything where the ways differ."""
        small = Bench.__new__(Bench)
        small.__dict__.update(self.__dict__ | {"tokens": 2048, "warmup": 0, "steps": 4})
        compiled = small.compiled("ram, int8")
        state = compiled.compress(synthetic_record(small.tokens, self.layers))
        scores = small.trace(state, 0.9)
        found = [small.run(compiled, state.fork(), scores, way) for way in WAYS]
        if not all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other)):
            raise SystemExit("correctness check failed: fetching ahead changes logits; nothing is reported")

    def measure(self, tier: str, overlaps: tuple[float, ...]) -> Iterator[Stall]:
        """Each way at each overlap, on one state."""
        compiled = self.compiled(tier)
        state = compiled.compress(synthetic_record(self.tokens, self.layers))
        for overlap in overlaps:
            scores = self.trace(state, overlap)
            for way in WAYS:
                yield self.time(compiled, state, scores, tier, overlap, way)

    def time(
        self,
        compiled: CompiledModel,
        state: State,
        scores: list[dict[int, Tensor]],
        tier: str,
        overlap: float,
        way: str,
    ) -> Stall:
        """Warm-up and timed steps of one way; every step begins with what `tier` calls for."""
        switch(compiled, state, scores, way)
        row, ids = state.rows[0], torch.ones(1, 1, dtype=torch.int64)
        times, stalls, cold = [], [], []
        for place in range(self.warmup + self.steps):
            if place == self.warmup:
                before = replace(row.traffic)
            if TIERS[tier][0] == "disk":
                put_out(state)
                cold.append(in_cache(state))
            stalled, started = row.traffic.stalled_seconds, time.perf_counter()
            compiled.extend(state, ids)
            times.append(1000 * (time.perf_counter() - started))
            stalls.append(1000 * (row.traffic.stalled_seconds - stalled))
        steps, after = self.steps, row.traffic
        hits, missed = (getattr(after, name) - getattr(before, name) for name in ("hit_tokens", "missed_tokens"))
        moved, held, ahead = (
            getattr(after, name) - getattr(before, name) for name in ("moved_bytes", "held_bytes", "ahead_bytes")
        )
        step_ms, stall_ms = (statistics.median(x[self.warmup :]) for x in (times, stalls))
        found = Stall(
            tier,
            overlap,
            way,
            held / max(1, moved + held),
            hits / max(1, hits + missed),
            step_ms,
            stall_ms,
            stall_ms / step_ms,
            moved / steps,
            ahead / steps,
            statistics.mean(cold) if cold else None,
        )
        show(found)
        return found


def switch(compiled: CompiledModel, state: State, scores: list[dict[int, Tensor]], way: str) -> None:
    """Have the state go on by one way: its rows are told anew whether to fetch ahead, and what their routers are."""
    state.placement = replace(compiled.placement, prefetch=way != "off", guesses=True)
    for row in state.rows:
        router = (KnownReplay if way == "known" else Replay)(scores, row.tokens)
        row.placement, row.lookahead = state.placement, None
        for memory in row.memories():
            memory.ahead, memory.supply, memory.likely = 0, None, None
            memory.components = replace(memory.components, router=router)


def waiting(state: State) -> Iterator[Tensor]:
    """The mapped tensors of the folded tokens, whole."""
    for row in state.rows:
        for memory in row.memories():
            for part in memory.spans.host_tokens.parts.values():
                if on_disk(part._data):
                    yield part._data


def put_out(state: State) -> None:
    """Write what is dirty, and take the files' pages out of the page cache."""
    for x in waiting(state):
        at, size = ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.nbytes)
        libc.msync(at, size, SYNC)
        libc.madvise(at, size, PAGEOUT)


def in_cache(state: State) -> float:
    """Share of the files' pages that are in the page cache."""
    there = count = 0
    for x in waiting(state):
        pages = (ctypes.c_ubyte * -(-x.nbytes // 4096))()
        libc.mincore(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.nbytes), pages)
        there, count = there + sum(page & 1 for page in pages), count + len(pages)
    return there / max(1, count)


def own_hits(steps: int) -> list[dict[str, Any]]:
    """Overlap and hits of the bundled model's own steps, on text."""
    model, tokenizer = bundled.load()
    config = CompileConfig(floor=0, prefetch=True)
    full = semkv.compile(model, bundled.profile(), method="full", config=config)
    ids = torch.tensor([tokenizer(make_text(4096, 3, with_tasks=True), add_special_tokens=False)["input_ids"]])
    out = []
    for method in ("quest", "sketch", "sekv", "sentencekv", "specontext"):
        options = {"sentencekv": {"recoverable": True}}.get(method, {})
        timing = time_compiled(full.with_method(method, BUDGET, **options), ids, warmup=4, steps=steps)
        out.append({"method": method, "overlap": timing.overlap, "hit_rate": timing.hit_rate})
        print(f"bundled {method:12} overlap {timing.overlap:6.1%}, hits {timing.hit_rate:6.1%}", flush=True)
    return out


def show(stall: Stall) -> None:
    """One line of the table."""
    cold = "" if stall.cold is None else f", {stall.cold:.1%} in the page cache"
    print(
        f"{stall.tier:12}{stall.asked:5.0%} {stall.way:8}{stall.step_ms:9.1f} ms, stall {stall.stall_ms:8.2f} ms{stall.share:7.1%}, "
        f"there before {stall.overlap:6.1%}, hits {stall.hit_rate:6.1%}{cold}",
        flush=True,
    )


def verdict(stalls: list[dict[str, Any]], off: dict[tuple[str, float], float]) -> str:
    """Where the bar is met, and by what it is missed elsewhere."""
    told = []
    for x in stalls:
        if x["asked"] != TEXT or x["way"] == "off":
            continue
        less = off[x["tier"], x["asked"]] / max(x["stall_ms"], 1e-3)
        failed = [f"{100 * x['share']:.1f} %"] * (x["share"] > MOST) + [f"{less:.1f} times less"] * (less < LEAST)
        told.append(f"{x['tier']}, `{x['way']}`: " + (f"missed ({' and '.join(failed)})" if failed else "met"))
    return "; ".join(told) + "."


def page(report: dict[str, Any]) -> Path:
    """docs/results/fetch_stall.md from the results."""
    off = {(x["tier"], x["asked"]): x["stall_ms"] for x in report["stalls"] if x["way"] == "off"}
    lines = [
        [
            x["tier"],
            f"{100 * x['asked']:.0f}",
            x["way"],
            f"{x['step_ms']:.1f}",
            f"{x['stall_ms']:.2f}",
            f"{100 * x['share']:.1f}",
            "-" if x["way"] == "off" else f"{off[x['tier'], x['asked']] / max(x['stall_ms'], 1e-3):.1f}",
            f"{100 * x['overlap']:.1f}",
            f"{100 * x['hit_rate']:.0f}",
            f"{x['moved_bytes'] / 2**20:.1f}",
            f"{x['ahead_bytes'] / 2**20:.1f}",
        ]
        for x in report["stalls"]
    ]
    columns = ["tier", "overlap, %", "fetched ahead", "step, ms", "stall, ms", "stall, %", "times less than off"]
    columns += ["there before, %", "hits, %", "lacked, MiB", "ahead, MiB"]
    cold = [x["cold"] for x in report["stalls"] if x["cold"] is not None]
    own = [[x["method"], f"{100 * x['overlap']:.0f}", f"{100 * x['hit_rate']:.0f}"] for x in report["bundled"]]
    return write_document(
        "fetch_stall",
        "# Standing still for folded tokens",
        f"Made by `benchmarks/fetch_stall.py`: a decoder of {report['layers']} layers with 8 KV heads of 128 and random float32 "
        f"weights, {report['tokens']:,} tokens, 10 % of the KV, pages of {PAGE} tokens that a drawn trace chooses: scores drift, so that "
        f"pages enter and leave around the cut, as fast as the overlap says. Medians of {report['steps']} steps. `off`: steps fetch what "
        "they lack. `likely`: a thread fetches the pages below the cut of a layer's last step, two layers ahead. `known`: it fetches what "
        "the layer will lack, as with a retrieval head. A stall is the time in which a step waits for that thread or fetches for itself.",
        "Bar, at 95 % overlap: a stall of at most 5 % of the step, and at most half of that without fetching ahead. "
        + verdict(report["stalls"], off),
        table(columns, lines),
        "A stall is not all of a step: on cores that compute as well, the thread that fetches takes time from the layers, so that steps as "
        "a whole are longer with it wherever reading is quick. That is why it is off by default for tokens in RAM, and on for the disk "
        "only where the choice is known.",
        "On the disk the files' pages are put out of the page cache before every step, which is the coldest that it can be"
        + (f" ({100 * max(cold):.1f} % of them at most stayed)." if cold else "."),
        "## The bundled model's own steps",
        "Text of 4,096 tokens, 10 % of the KV: how much of what a step unfolds was there before, and how much of the rest had been "
        "fetched ahead. One token is a whole word here, so that its queries turn faster than the drawn ones.",
        table(["method", "there before, %", "hits, %"], own),
        "## Provenance",
        measured_on(report["environment"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--overlaps", default="0.8,0.95,0.99")
    parser.add_argument("--tiers", default=";".join(TIERS), help="separated by semicolons")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--folder", default=None, help="where the disk tier's files are; default: the temporary folder")
    output = Output(parser, RESULTS, page)
    arguments = parser.parse_args()
    if output.page_alone(arguments):
        return
    started = now()
    folder = arguments.folder or tempfile.gettempdir()
    bench = Bench(arguments.layers, arguments.tokens, arguments.warmup, arguments.steps, folder)
    bench.check()
    overlaps = tuple(map(float, arguments.overlaps.split(",")))
    stalls = [asdict(one) for tier in arguments.tiers.split(";") for one in bench.measure(tier, overlaps)]
    report = {
        "environment": describe(started).model_dump(mode="json"),
        "tokens": bench.tokens,
        "layers": bench.layers,
        "steps": bench.steps,
        "stalls": stalls,
        "bundled": own_hits(2 * bench.steps),
    }
    output.save(report, arguments.out)
    output.finish(arguments.out)


if __name__ == "__main__":
    main()
