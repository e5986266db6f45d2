"""Time and memory of a decode step: semkv's methods beside Hugging Face's DynamicCache and StaticCache, in one process.

    python benchmarks/decode_step.py                                # on CUDA: a Llama of 8 layers with 8 KV heads of 128
    python benchmarks/decode_step.py --lengths 8192,32768 --rows 4
    python benchmarks/decode_step.py --dry-run                      # seconds on a CPU: that everything runs, no figures

Weights are random: what is measured does not depend on them, so `sekv` routes without training (`router=coarse`). Before
anything is timed, `full` must give the tokens of the model's own `generate`; otherwise nothing is reported. Each entry
reads the same prompt, takes --warmup steps and then --steps timed ones, a token each, the device awaited after every step. Memory is
the allocator's peak over the timed steps, less weights (CUDA), and the bytes that the caches' tensors hold. Writes JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import semkv
from semkv.evaluation.environment import describe, now

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = (0.05, 0.1, 0.2)
VOCAB = 1024


@dataclass(frozen=True)
class Entry:
    """One line of the result. Times in milliseconds, sizes in bytes; None where it could not be measured here.

    cache_bytes: keys and values that the cache's tensors hold on the device (for semkv: the peak that the budget counts).
    allocated_bytes: the allocator's peak during the timed steps, weights taken off. host_bytes: folded tokens.
    """

    name: str
    budget: float | None
    length: int
    rows: int
    step_ms: float
    step_p95_ms: float
    cache_bytes: int
    host_bytes: int
    moved_bytes_per_step: float
    allocated_bytes: int | None


def build(small: bool, device: torch.device, dtype: torch.dtype, longest: int) -> LlamaForCausalLM:
    """A Llama with random weights; Hugging Face's SDPA attention."""
    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    if small:
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    head_dim = 16 if small else 128
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, head_dim=head_dim, max_position_embeddings=longest, rope_theta=5e5, **sizes)
    return LlamaForCausalLM(config).to(device, dtype).eval()


def timed(step: Callable[[], None], device: torch.device, warmup: int, steps: int) -> list[float]:
    """Milliseconds of each of `steps` calls after `warmup` calls."""
    found = []
    for number in range(warmup + steps):
        if number == warmup and device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= warmup:
            found.append(1000 * (time.perf_counter() - started))
    return found


@torch.no_grad()
def hugging_face(name: str, model: Any, ids: Tensor, warmup: int, steps: int) -> tuple[list[float], int]:
    """Times of decode steps with a cache of Hugging Face's, and the bytes of its tensors."""
    total = ids.shape[1] + warmup + steps + 1
    cache = DynamicCache() if name == "DynamicCache" else StaticCache(config=model.config, max_cache_len=total)
    at = ids.shape[1]
    last = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)

    def step() -> None:
        nonlocal last, at
        positions = torch.full((ids.shape[0], 1), at, device=ids.device)
        last = (
            model(last, past_key_values=cache, position_ids=positions, use_cache=True)
            .logits[:, -1]
            .argmax(-1, keepdim=True)
        )
        at += 1

    times = timed(step, ids.device, warmup, steps)
    return times, sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@torch.no_grad()
def compiled_steps(compiled: Any, ids: Tensor, warmup: int, steps: int) -> tuple[list[float], Any]:
    """Times of decode steps of a compiled model, and the state at the end."""
    state = compiled.prefill(ids)
    last = state.logits.argmax(-1, keepdim=True)

    def step() -> None:
        nonlocal last
        last = compiled.extend(state, last)[:, -1].argmax(-1, keepdim=True)

    return timed(step, ids.device, warmup, steps), state


def entry(name: str, budget: float | None, ids: Tensor, times: list[float], base: int, **sizes: Any) -> Entry:
    """The result of one entry; `base`: bytes allocated before its cache was made."""
    peak = torch.cuda.max_memory_allocated(ids.device) - base if ids.is_cuda else None
    ordered = sorted(times)
    return Entry(
        name=name, budget=budget, length=ids.shape[1], rows=ids.shape[0], step_ms=statistics.median(ordered),
        step_p95_ms=ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], allocated_bytes=peak, **sizes,
    )  # fmt: skip


def measure(model: Any, base: Any, ids: Tensor, warmup: int, steps: int) -> list[Entry]:
    """All entries for one prompt."""
    found = []
    weights = torch.cuda.memory_allocated(ids.device) if ids.is_cuda else 0
    for name in ("DynamicCache", "StaticCache"):
        times, nbytes = hugging_face(name, model, ids, warmup, steps)
        found.append(entry(name, None, ids, times, weights, cache_bytes=nbytes, host_bytes=0, moved_bytes_per_step=0.0))
        gc.collect()
    variants = [("full", None, {}, "shared")]
    for budget in BUDGETS:
        variants += [("streaming_llm", budget, {}, "shared"), ("snapkv", budget, {}, "shared")]
        variants += [("sekv", budget, {"router": "coarse"}, residency) for residency in ("shared", "elastic")]
    for method, budget, options, residency in variants:
        compiled = base.with_method(method, budget, config=semkv.CompileConfig(residency=residency), **options)
        times, state = compiled_steps(compiled, ids, warmup, steps)
        nbytes, name = state.nbytes, f"semkv {method}" + (f", {residency}" if method == "sekv" else "")
        moved = state.stats.moved_bytes_per_step * ids.shape[0]
        host = nbytes["host"] + nbytes["disk"]
        found.append(
            entry(
                name,
                budget,
                ids,
                times,
                weights,
                cache_bytes=nbytes["peak"],
                host_bytes=host,
                moved_bytes_per_step=moved,
            )
        )
        del state
        gc.collect()
    return found


@torch.no_grad()
def check(model: Any, base: Any, device: torch.device) -> None:
    """Refuse to report anything where `full` and the model itself do not generate the same tokens."""
    ids = torch.randint(1, VOCAB, (2, 96), generator=torch.Generator().manual_seed(1)).to(device)
    wanted = model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
    found = base.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
    same = (wanted == found).float().mean()
    if model.dtype in (torch.float32, torch.float64) and same < 1:
        raise SystemExit("correctness check failed: `full` does not give the model's own tokens; nothing is reported")
    if not (model(ids).logits[:, -1] - base.prefill(ids).logits).abs().max() < 0.1 * model(ids).logits.abs().max():
        raise SystemExit("correctness check failed: logits differ by a tenth of the largest; nothing is reported")


def show(entries: list[Entry]) -> None:
    """A short table."""
    print(
        f"{'':28}{'budget':>8}{'tokens':>8}{'step, ms':>10}{'p95':>9}{'KV, MiB':>10}{'host':>9}{'moved':>9}{'allocated':>11}"
    )
    for e in entries:
        budget = "-" if e.budget is None else f"{100 * e.budget:g} %"
        mib = [e.cache_bytes / 2**20, e.host_bytes / 2**20, e.moved_bytes_per_step / 2**20]
        allocated = "-" if e.allocated_bytes is None else f"{e.allocated_bytes / 2**20:.1f}"
        print(
            f"{e.name:28}{budget:>8}{e.length:>8}{e.step_ms:>10.2f}{e.step_p95_ms:>9.2f}{mib[0]:>10.2f}{mib[1]:>9.2f}{mib[2]:>9.2f}{allocated:>11}"
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--lengths", default="4096,8192,32768", help="prompt tokens")
    options.add_argument("--rows", type=int, default=1, help="sequences in a batch")
    options.add_argument("--steps", type=int, default=32)
    options.add_argument("--warmup", type=int, default=4)
    options.add_argument("--dtype", default=None, choices=("float32", "float16", "bfloat16"))
    options.add_argument("--device", default=None)
    options.add_argument("--dry-run", action="store_true", help="a tiny model and a short prompt")
    options.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "decode_step.json")
    arguments = options.parse_args()
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    lengths = [900] if arguments.dry_run else [int(length) for length in arguments.lengths.split(",")]
    warmup, steps = (1, 3) if arguments.dry_run else (arguments.warmup, arguments.steps)
    started = now()
    model = build(arguments.dry_run, device, dtype, max(lengths) + warmup + steps + 1)
    base = semkv.compile(model)
    check(model, base, device)
    entries: list[Entry] = []
    for length in lengths:
        ids = torch.randint(1, VOCAB, (arguments.rows, length), generator=torch.Generator().manual_seed(length)).to(
            device
        )
        entries += measure(model, base, ids, warmup, steps)
    report = {
        "dry_run": arguments.dry_run,
        "model": model.config.to_diff_dict(),
        "dtype": str(dtype).removeprefix("torch."),
        "environment": describe(started, str(device)).model_dump(mode="json"),
        "entries": [asdict(e) for e in entries],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    show(entries)
    print(f"wrote {arguments.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
