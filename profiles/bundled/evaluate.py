"""Full-cache accuracy of the bundled model: exact answers by family and length, and a control without the evidence.

    python -m semkv.profiles.bundled.evaluate --out benchmarks/results/bundled_model.json

A context is prefilled once; question and answer follow in one forward. Greedy decoding gives the answer exactly when
every answer token is the argmax given the ones before it, so nothing is decoded. The control hides the evidence
sentences' keys from the question and answer tokens: what is left is what the model knows without them.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, LlamaForCausalLM, PreTrainedTokenizerBase

from semkv.model.huggingface import CACHE

from . import MODEL_DIR
from .tasks import FAMILIES, Haystack, Question, make_haystack

LENGTHS = (512, 1024, 2048, 4096, 8192)
SAMPLES = {512: 100, 1024: 100, 2048: 60, 4096: 40, 8192: 40}
"""Questions per family and length."""
SHARED_FROM = 4096
"""From this length on, four questions share a context, except in ``single``, which has one needle."""
FIRST_SEED = 1_000_000_000
"""Evaluation seeds start here."""


def evidence_tokens(offsets: list[tuple[int, int]], question: Question) -> list[int]:
    """Indices of the tokens (character ``offsets`` in the context) inside the question's evidence."""
    return [
        i
        for i, (start, end) in enumerate(offsets)
        if end > start and any(a <= start and end <= b for a, b in question.evidence)
    ]


def extend_mask(n_context: int, n_new: int, hidden: list[int]) -> Tensor:
    """Additive mask [1, 1, n_new, n_context + n_new]: causal, with the context's tokens in ``hidden`` out of sight."""
    mask = torch.zeros(1, 1, n_new, n_context + n_new, dtype=torch.float32, device="cpu")
    mask[..., n_context:].masked_fill_(torch.ones(n_new, n_new, dtype=torch.bool, device="cpu").triu(1), float("-inf"))
    mask[..., hidden] = float("-inf")
    return mask


@torch.no_grad()
def exact_answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, haystack: Haystack
) -> list[tuple[bool, bool]]:
    """For each question: whether the greedy answer is exact with the full cache, and with the evidence's KV dropped."""
    encoded = tokenizer(haystack.context, return_offsets_mapping=True, return_tensors="pt")
    offsets, context = encoded["offset_mapping"][0].tolist(), encoded["input_ids"]
    n = context.shape[1]
    cache = DynamicCache(config=model.config)
    model(context, logits_to_keep=1, **{CACHE: cache})
    results = []
    for question in haystack.questions:
        asked = tokenizer(question.text, add_special_tokens=False)["input_ids"]
        answer = tokenizer(question.answer, add_special_tokens=False)["input_ids"]
        new = torch.tensor([asked + answer[:-1]], dtype=torch.int64, device="cpu")
        pair = []
        for hidden in ([], evidence_tokens(offsets, question)):
            mask = extend_mask(n, new.shape[1], hidden).to(model.dtype)
            positions = torch.arange(n, n + new.shape[1], dtype=torch.int64, device="cpu")[None]
            logits = model(new, attention_mask=mask, position_ids=positions, **{CACHE: cache}).logits[0]
            cache.crop(-new.shape[1])
            pair.append(logits[len(asked) - 1 :].argmax(-1).tolist() == answer)
        results.append((pair[0], pair[1]))
    return results


def accuracy_table(
    folder: Path, samples: dict[int, int], families: tuple[str, ...] = FAMILIES, report: bool = True
) -> list[dict[str, object]]:
    """Counts of exact answers, a row per family and length in tokens: ``samples[length]`` questions."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for family in families:
        for length, count in samples.items():
            began = time.monotonic()
            shared = 4 if length >= SHARED_FROM and family != "single" else 1
            results = []
            for i in range(-(-count // shared)):
                seed = FIRST_SEED + length * 1000 + i
                haystack = make_haystack(family, length, seed, n_questions=min(shared, count))
                results += exact_answers(model, tokenizer, haystack)
            full, dropped = (sum(result[i] for result in results) for i in (0, 1))
            rows.append(
                {
                    "family": family,
                    "tokens": length,
                    "samples": len(results),
                    "exact": full,
                    "exact_without_evidence": dropped,
                }
            )
            if report:
                print(
                    f"{family:10} {length:5} tokens: {full / len(results):.3f} exact, {dropped / len(results):.3f} "
                    f"without the evidence ({len(results)} samples, {time.monotonic() - began:.0f} s)",
                    flush=True,
                )
    return rows


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor()


def write_results(rows: list[dict[str, object]], folder: Path, path: Path) -> None:
    """Writes ``rows`` as JSON with what is needed to repeat them; rows of other families and lengths stay."""
    measured = {(row["family"], row["tokens"]) for row in rows}
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [row for row in kept if (row["family"], row["tokens"]) not in measured] + rows
    model = LlamaForCausalLM.from_pretrained(folder)
    record = {
        "what": "exact answers of the bundled model, full cache, and with the evidence's KV dropped",
        "command": shlex.join(["python", "-m", "semkv.profiles.bundled.evaluate", *sys.argv[1:]]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "machine": {"processor": _processor(), "threads": torch.get_num_threads(), "system": platform.system()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument(
        "--samples", type=int, help="questions per family and length (default: 100, fewer from 2048 tokens on)"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    samples = {length: args.samples or SAMPLES.get(length, 40) for length in args.lengths}
    for family in args.families:
        rows = accuracy_table(args.model, samples, (family,))
        if args.out:
            write_results(rows, args.model, args.out)


if __name__ == "__main__":
    main()
