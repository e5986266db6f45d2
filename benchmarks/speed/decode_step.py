"""Time and memory of decode steps at long contexts: semkv's methods beside Hugging Face's caches.

    python -m benchmarks.speed.decode_step            # on CUDA: the shapes of Llama-3.1-8B in bfloat16, eight minutes at most
    python -m benchmarks.speed.decode_step --deadline 180 --lengths 32768,131072 --layers 8
    python -m benchmarks.speed.decode_step --dry-run  # tiny sizes on a CPU: that everything runs, no figures

Weights are random, and states are not prefilled but made of random keys and values of a length, one pair of tensors for all layers:
what a step costs depends on neither. Every step reads the same token; with `95 % overlap` behind its name a method pays for its own
choice and then takes one that overlaps so with the step before, as text does (`replay.py`). `no graphs` launches what lies between two
attentions operator by operator. Beside them are Hugging Face's DynamicCache with SDPA and with flex_attention, its offloaded form, and
StaticCache, eager and compiled; the dry run leaves out what is compiled.
Before anything is timed, `full` must give the model's own logits on such a state. Cells come in order of importance; what the
deadline leaves no time for is said to be missing, and so is what fails, with its reason. Contenders share a process, and the
allocator's cache is emptied between them.

Of a cell: step times (the device is awaited after each), the bytes that the cache has on the device, what waits on the host, what
moves per step, the allocator's peak over the timed steps less the weights, and the floor: the larger of the bytes that a step must
read over the measured device bandwidth and the bytes that it moves over the measured bandwidth of the link. `busy` is what the device
computes and copies in a step: what is left of the step, it waits for the host.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import semkv
from benchmarks.lib.places import ROOT
from benchmarks.lib.replay import overlapping
from semkv.evaluation.environment import describe, now
from semkv.model.huggingface import CACHE
from semkv.runtime.prompt.record import RowRecord

SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "sekv": {"router": "coarse", "forms": "int8"},
    "compresskv": {"recoverable": True, "selection": "all", "allocation": "uniform"},
    "sentencekv": {"buckets": "chunks", "query": "token"},
}
"""Of each method, what does without a profile."""
DYNAMIC, FLEX, OFFLOADED = "DynamicCache", "DynamicCache, flex", "DynamicCache, offload"
STATIC, COMPILED = "StaticCache", "StaticCache, compiled"
THEIRS = (DYNAMIC, FLEX, OFFLOADED, STATIC, COMPILED)
OVERLAP = 0.95
TEXT = f", {OVERLAP:.0%} overlap".replace("%", " %")
"""Behind a method's name: with a choice that overlaps so."""
PLAIN = ", no graphs"
"""Behind a method's name: what lies between two attentions operator by operator."""
WHOLE = ", whole step"
"""Behind a method's name: all of a step as one CUDA graph."""
PROFILED = 3
LONG_RUN = 1000
"""Steps of the cell whose 99th percentile is asked for."""


@dataclass(frozen=True)
class Cell:
    """What one line is of. budget: a fraction or tokens, None for all; steps: timed ones."""

    name: str
    tokens: int
    budget: float | int | None
    rows: int
    steps: int


@dataclass(frozen=True)
class Result:
    """Times in milliseconds, sizes in bytes; None where it could not be measured here. busy_ms: of a step, what the device computes and
    copies. missing: why there are no figures."""

    cell: Cell
    median_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    floor_ms: float | None = None
    busy_ms: float | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    moved_bytes: float | None = None
    overlap: float | None = None
    allocated_bytes: int | None = None
    first_ms: float | None = None
    missing: str | None = None


def build(shape: dict[str, int], device: torch.device, dtype: torch.dtype, longest: int) -> LlamaForCausalLM:
    """A Llama with random weights, made where it runs; Hugging Face's SDPA attention."""
    config = LlamaConfig(max_position_embeddings=longest, rope_theta=5e5, dtype=dtype, **shape)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        weight.fill_(1.0) if "norm" in name else weight.normal_(std=0.02)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)  # its buffers are no parameters
    return model.eval()


def synthetic_record(model: LlamaForCausalLM, tokens: int) -> RowRecord:
    """What a prefill of `tokens` tokens leaves, of random numbers; all layers have the same keys and values."""
    config, device = model.config, model.device
    generator = torch.Generator(device).manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(model.dtype).cpu()

    layers = range(config.num_hidden_layers)
    k, v = (draw(config.num_key_value_heads, tokens, config.head_dim) for _ in range(2))
    q = draw(config.num_attention_heads, 64, config.head_dim)
    return RowRecord(
        ids=torch.randint(1, config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(tokens)),
        keys=dict.fromkeys(layers, k),
        values=dict.fromkeys(layers, v),
        queries=dict.fromkeys(layers, q),
        surprisal=draw(tokens).float().abs(),
        logits=draw(config.vocab_size).to(device),
    )


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(step: Callable[[], object], device: torch.device, warmup: int, steps: int) -> list[float]:
    """Milliseconds of each of `steps` calls after `warmup` calls, ascending."""
    for _ in range(warmup):
        step()
    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        wait(device)
        found.append(1000 * (time.perf_counter() - started))
    return sorted(found)


def busy(step: Callable[[], object], device: torch.device) -> float | None:
    """Milliseconds per step that kernels and copies take on a CUDA device, over `PROFILED` steps."""
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            step()
        wait(device)
    return sum(event.self_device_time_total for event in found.key_averages()) / PROFILED / 1000


def bandwidths(device: torch.device, nbytes: int) -> dict[str, float]:
    """Bytes per second: read and written by a copy on the device, and from pinned host memory to it."""
    here, there = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    copy, link = (
        min(timed(run, device, 2, 5)) / 1000 for run in (lambda: there.copy_(here), lambda: there.copy_(host))
    )
    return {"device": 2 * nbytes / copy, "link": nbytes / link}


class Bench:
    """Contenders on one model."""

    def __init__(self, model: LlamaForCausalLM, warmup: int, bandwidth: dict[str, float], kernels: str) -> None:
        self.model, self.warmup, self.bandwidth, self.device = model, warmup, bandwidth, model.device
        self.read = sum(x.nbytes for x in model.parameters()) - model.model.embed_tokens.weight.nbytes
        self.full = semkv.compile(model, config=semkv.CompileConfig(floor=0, kernels=kernels))
        self.weights = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        self._record: RowRecord | None = None

    def record(self, tokens: int) -> RowRecord:
        """The synthetic record of a length; one is held at a time."""
        if self._record is None or self._record.tokens != tokens:
            self._record = None
            self._record = synthetic_record(self.model, tokens)
        return self._record

    def cache(self, name: str, record: RowRecord, rows: int, more: int) -> Any:
        """A cache of Hugging Face's that holds the record."""
        if name in (STATIC, COMPILED):
            cache = StaticCache(self.model.config, record.tokens + more)
        else:
            cache = DynamicCache(config=self.model.config, offloading=name == OFFLOADED)
        for layer in record.keys:
            k, v = (x[layer].to(self.device)[None].expand(rows, -1, -1, -1) for x in (record.keys, record.values))
            cache.update(k, v, layer)
        return cache

    def check(self) -> None:
        """Refuse to report anything where `full` does not give the model's own logits on the same synthetic state."""
        record = self.record(300)
        ids = torch.full((1, 1), 7, device=self.device)
        at = torch.full((1, 1), 300, device=self.device)
        wanted = (
            self.model(ids, position_ids=at, **{CACHE: self.cache("DynamicCache", record, 1, 8)}).logits[:, -1].float()
        )
        got = self.full.extend(self.full.compress(record), ids)[:, -1].float()
        allowed = (1e-4 if self.model.dtype == torch.float32 else 0.05) * float(wanted.abs().max())
        if not float((got - wanted).abs().max()) <= allowed:
            raise SystemExit(
                "correctness check failed: `full` does not give the model's own logits; nothing is reported"
            )

    def measure(self, cell: Cell) -> Result:
        """One line."""
        if cell.name.startswith("first token"):
            return self.first_token(cell)
        record, ids = self.record(cell.tokens), torch.ones(cell.rows, 1, dtype=torch.int64, device=self.device)
        if cell.name in THEIRS:
            return self.theirs(cell, record, ids)
        method, _, kind = cell.name.partition(", ")
        text = f", {kind}" == TEXT
        changed: dict[str, Any] = {"cuda_graphs": False} if f", {kind}" == PLAIN else {}
        if f", {kind}" == WHOLE and self.device.type == "cuda":
            changed["cuda_graphs"] = "step"
        compiled = self.full
        if cell.budget is not None or changed:
            config = self.full.settings.model_copy(update=changed)
            compiled = self.full.with_method(method, cell.budget, config=config, **OPTIONS[method])
        state = compiled.compress([record] * cell.rows)
        if text:
            overlapping(state, OVERLAP)

        def step() -> None:
            compiled.extend(state, ids)

        times = timed(step, self.device, self.warmup, cell.steps)
        nbytes, stats = state.nbytes, state.stats
        found = self.result(cell, times, nbytes["device"], stats.moved_bytes_per_step * cell.rows)
        found = replace(found, busy_ms=busy(step, self.device))
        return replace(found, host_bytes=nbytes["host"] + nbytes["disk"], overlap=stats.overlap)

    def theirs(self, cell: Cell, record: RowRecord, ids: Tensor) -> Result:
        """Steps of the model itself on one of Hugging Face's caches."""
        cache, at = self.cache(cell.name, record, cell.rows, self.warmup + cell.steps + PROFILED + 1), cell.tokens
        forward = torch.compile(self.model.forward, mode="reduce-overhead") if cell.name == COMPILED else self.model
        held = sum(
            layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.keys.device == self.device
        )

        def step() -> None:
            nonlocal at
            positions = torch.full((cell.rows, 1), at, device=self.device)
            forward(ids, position_ids=positions, use_cache=True, **{CACHE: cache})
            at += 1

        self.model.set_attn_implementation("flex_attention" if cell.name == FLEX else "sdpa")
        try:
            found = self.result(cell, timed(step, self.device, self.warmup, cell.steps), held)
            return replace(found, busy_ms=busy(step, self.device))
        finally:
            self.model.set_attn_implementation("sdpa")

    def first_token(self, cell: Cell) -> Result:
        """A real prompt of random ids, read and, where there is a budget, compressed."""
        ids = self.record(cell.tokens).ids[None].to(self.device)
        compiled = None if cell.budget is None else self.full.with_method("sekv", cell.budget, **OPTIONS["sekv"])

        def read() -> None:
            if compiled is None:
                self.model(ids, use_cache=True, logits_to_keep=1, **{CACHE: DynamicCache()})
            else:
                compiled.prefill(ids)

        return Result(cell, first_ms=timed(read, self.device, 0, 1)[0])

    def result(self, cell: Cell, times: list[float], held: int, moved: float = 0.0) -> Result:
        """`times` ascending; held: bytes that the cache has on the device."""

        def percentile(share: float) -> float:
            return times[min(len(times) - 1, math.ceil(share * len(times)) - 1)]

        floor = max((self.read + held) / self.bandwidth["device"], moved / self.bandwidth["link"])
        cuda = self.device.type == "cuda"
        return Result(
            cell,
            statistics.median(times),
            percentile(0.95),
            percentile(0.99),
            1000 * floor,
            None,
            held,
            0,
            moved,
            None,
            torch.cuda.max_memory_allocated(self.device) - self.weights if cuda else None,
        )


def cells(lengths: list[int], share: float, fixed: int, steps: int, long_run: int, rows: int) -> list[Cell]:
    """All lines, the most telling first. share: of the KV, a budget; fixed: tokens of one that does not grow."""
    middle = lengths[min(1, len(lengths) - 1)]
    out = [Cell(name, middle, None, 1, steps) for name in (DYNAMIC, "full", STATIC)]
    out += [Cell(name + TEXT, middle, share, 1, steps) for name in ("compresskv", "sekv")]
    out += [Cell("full" + PLAIN, middle, None, 1, steps)]
    out += [
        Cell(name + WHOLE, middle, budget, 1, steps)
        for name, budget in (("full", None), ("compresskv", share), ("sekv", share))
    ]
    out += [Cell("compresskv", length, fixed, 1, steps) for length in lengths]
    out += [Cell(name, middle, None, 1, steps) for name in (COMPILED, FLEX)]
    out += [Cell("sekv", middle, share, 1, steps)]
    out += [Cell("first token, full cache", middle, None, 1, 1), Cell("first token, sekv", middle, share, 1, 1)]
    out += [Cell("full", length, None, 1, steps) for length in lengths]
    out += [Cell(DYNAMIC, length, None, 1, steps) for length in lengths]
    out += [Cell(name, lengths[0], budget, rows, steps) for name, budget in ((DYNAMIC, None), ("sekv", share))]
    out += [Cell(OFFLOADED, middle, None, 1, steps), Cell("sekv", lengths[0], share, 1, long_run)]
    out += [Cell(name, length, fixed, 1, steps) for name in ("sekv", "sentencekv") for length in lengths]
    return list(dict.fromkeys(out))


HEADER = (
    f"{'':24}{'tokens':>8}{'rows':>5}{'budget':>8}{'step, ms':>10}{'p99':>9}{'busy':>9}{'floor':>9}{'KV, MiB':>10}{'moved':>9}{'there':>7}"
    f"{'allocated':>10}"
)


def show(result: Result) -> None:
    """One line of the table."""
    cell = result.cell
    budget = "-" if cell.budget is None else f"{100 * cell.budget:g} %" if cell.budget < 1 else f"{cell.budget}"
    start = f"{cell.name:24}{cell.tokens:>8}{cell.rows:>5}{budget:>8}"
    if result.missing is not None:
        print(f"{start}  missing: {result.missing[:120]}", flush=True)
    elif result.first_ms is not None:
        print(f"{start}{result.first_ms:>10.1f} ms to the first token", flush=True)
    else:
        allocated = "-" if result.allocated_bytes is None else f"{result.allocated_bytes / 2**20:.0f}"
        working = "-" if result.busy_ms is None else f"{result.busy_ms:.2f}"
        overlap = "-" if result.overlap is None else f"{100 * result.overlap:.0f} %"
        print(
            f"{start}{result.median_ms:>10.2f}{result.p99_ms:>9.2f}{working:>9}{result.floor_ms:>9.2f}{result.device_bytes / 2**20:>10.1f}"
            f"{result.moved_bytes / 2**20:>9.1f}{overlap:>7}{allocated:>10}",
            flush=True,
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--lengths", default="32768,131072,262144,524288", help="tokens of the states, ascending")
    options.add_argument("--fixed", type=int, default=4096, help="tokens of the budget that does not grow")
    options.add_argument("--rows", type=int, default=8, help="sequences of the batch")
    options.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--warmup", type=int, default=4)
    options.add_argument("--deadline", type=float, default=480.0, help="seconds after which no further cell begins")
    options.add_argument("--kernels", default="auto", choices=("auto", "torch", "cpp", "triton"))
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--dry-run", action="store_true", help="a tiny model in float32 on a CPU")
    options.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "decode_step.json")
    given = options.parse_args()
    started, begun = now(), time.monotonic()
    device = torch.device("cpu" if given.dry_run else given.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    lengths = [320] if given.dry_run else sorted(map(int, given.lengths.split(",")))
    warmup, steps, long_run = (0, 1, 1) if given.dry_run else (given.warmup, given.steps, LONG_RUN)
    share, fixed, rows = (0.3, 96, 2) if given.dry_run else (0.1, given.fixed, given.rows)
    shape = TINY if given.dry_run else SHAPE | {"num_hidden_layers": given.layers}
    torch.set_grad_enabled(False)
    model = build(shape, device, dtype, max(lengths) + warmup + long_run + 8)
    bandwidth = bandwidths(device, 1 << (22 if given.dry_run else 30))
    bench = Bench(model, warmup, bandwidth, given.kernels)
    bench.check()
    prepared = time.monotonic() - begun
    print(f"attention of a step by {bench.full.kernels}; ready after {prepared:.0f} s", flush=True)
    print(HEADER, flush=True)
    found: list[Result] = []
    lost: str | None = None
    for cell in cells(lengths, share, fixed, steps, long_run, rows):
        if given.dry_run and cell.name in (COMPILED, FLEX):
            continue
        if lost is not None:
            found.append(Result(cell, missing=f"the device was lost in `{lost}`"))
        elif time.monotonic() - begun > given.deadline:
            found.append(Result(cell, missing="the deadline had passed"))
        else:
            try:
                found.append(bench.measure(cell))
            except Exception as error:  # one contender that fails must not lose the others
                found.append(Result(cell, missing=f"{type(error).__name__}: {error}"))
                lost = (
                    cell.name if type(error).__name__ == "AcceleratorError" else None
                )  # nothing runs in its context any more
        show(found[-1])
        gc.collect()
        if device.type == "cuda" and lost is None:
            torch.cuda.empty_cache()
        write(given.out, model, bench, found, started, given.dry_run, prepared)


def write(
    path: Path, model: LlamaForCausalLM, bench: Bench, found: list[Result], started: str, dry: bool, prepared: float
) -> None:
    """The results so far, so that a run that is stopped keeps them."""
    report = {
        "dry_run": dry,
        "model": model.config.to_diff_dict(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kernels": bench.full.kernels,
        "bandwidth": bench.bandwidth,
        "prepared_s": prepared,
        "environment": describe(started, str(bench.device)).model_dump(mode="json"),
        "results": [asdict(one) for one in found],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
