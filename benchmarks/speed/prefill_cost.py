"""What compression adds to prefill: `sekv` against the same program without compression, alternating in one process.

    python -m benchmarks.speed.prefill_cost --json benchmarks/results/prefill_cost.json
    python -m benchmarks.speed.prefill_cost --models bundled --tokens 1024 --repeats 1      # that it runs

A prefill is `compiled.prefill` of a random prompt: reading it in chunks, and for `sekv` surprisal, segmentation, summaries and
factorisation. `full` reads the same prompt through the same graphs. The rounds alternate which of the two comes first; the ratio is
that of the medians of wall seconds, processor seconds stand beside it. `decoder` is that of benchmarks/speed/decode_cpu.py: 8 layers,
hidden 1024, 16 query and 8 KV heads of dim 128, MLP 2816, vocabulary 4096, random float32 weights; without a profile its spans are routed
untrained, which costs prefill nothing.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import semkv
from semkv.evaluation.environment import describe, now

BUDGET = 0.1
STRICT = semkv.CompileConfig(floor=0)
BAR = 1.25
"""Largest ratio of `sekv` to `full` at 8K tokens that counts as cheap."""


def bundled() -> tuple[Any, Any]:
    """(sekv, full) of the bundled model with its profile."""
    full = semkv.compile(semkv.bundled.load()[0], semkv.bundled.profile(), method="full", config=STRICT)
    return full.with_method("sekv", BUDGET), full


def decoder() -> tuple[Any, Any]:
    """(sekv, full) of the decoder of benchmarks/speed/decode_cpu.py."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=262144,
        rope_theta=5e5,
    )
    full = semkv.compile(LlamaForCausalLM(config).eval(), config=STRICT)
    return full.with_method("sekv", BUDGET, router="coarse"), full


MODELS = {"bundled": bundled, "decoder": decoder}


def timed(compiled: Any, ids: torch.Tensor) -> tuple[float, float]:
    """(wall, processor) seconds of one prefill."""
    wall, cpu = time.perf_counter(), time.process_time()
    compiled.prefill(ids)
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(name: str, tokens: int, repeats: int, profiled: bool) -> dict[str, Any]:
    """Medians and their ratio for one model."""
    contenders = dict(zip(("sekv", "full"), MODELS[name]()))
    vocab = contenders["full"].program.vocab_size
    ids = torch.randint(5, vocab, (1, tokens), generator=torch.Generator().manual_seed(0))
    if (
        contenders["full"].prefill(ids[:, :400]).logits.sub(contenders["sekv"].prefill(ids[:, :400]).logits).abs().max()
        > 1e-3
    ):
        raise SystemExit(
            "correctness check failed: sekv's prefill does not give the logits of full; nothing is reported"
        )
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in contenders}
    for round_number in range(repeats):
        for label in sorted(contenders, reverse=round_number % 2 == 1):
            times[label].append(timed(contenders[label], ids))
    if profiled:
        with cProfile.Profile() as profile:
            contenders["sekv"].prefill(ids)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    row: dict[str, Any] = {"model": name, "tokens": tokens, "budget": BUDGET, "repeats": repeats, "bar": BAR}
    for label, found in times.items():
        row[label] = {"wall": statistics.median(x[0] for x in found), "cpu": statistics.median(x[1] for x in found)}
    return row | {
        "ratio": row["sekv"]["wall"] / row["full"]["wall"],
        "cpu_ratio": row["sekv"]["cpu"] / row["full"]["cpu"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="bundled,decoder", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print where one more prefill with sekv spends its time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started = now()
    rows = [measure(name, options.tokens, options.repeats, options.profile) for name in options.models.split(",")]
    for row in rows:
        seconds = ", ".join(
            f"{label} {row[label]['wall']:.2f} s ({row[label]['cpu']:.2f} s cpu)" for label in ("full", "sekv")
        )
        print(
            f"{row['model']:8s} {row['tokens']} tokens: {seconds}; ratio {row['ratio']:.3f} ({row['cpu_ratio']:.3f} cpu), bar {BAR}"
        )
    if options.json is not None:
        environment = describe(started).model_dump(mode="json")
        report = {"environment": environment, "load": os.getloadavg()[2], "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
