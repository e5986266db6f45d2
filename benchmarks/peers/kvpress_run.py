"""Answers of the exported model to the exported questions under each press of kvpress; runs in its environment.

    ENV/bin/python benchmarks/peers/kvpress_run.py FOLDER      # reads model/ and samples.json, appends to kvpress.jsonl

For each context the press compresses the cache in prefill, through its own context manager, and each question is answered
greedily on what is left, as kvpress's pipeline does it: the question at the positions after the context, in one call, then
token by token; the answer is taken off the cache again. A question with `answer` is read up to the first token that differs; one with
`references` is answered in writing, until they are all there; of one with `text` the tokens' likelihoods are taken. A run that stops
goes on where it was. A press that fails on its first context leaves a row with the error, and is not tried again.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from prefill import Prefill
from presses import PRESSES, set_ratio
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel


class Held(NamedTuple):
    """Shares of the context's key-value pairs, over all layers and heads: those in the cache, those that are attended to."""

    cached: float
    attended: float


def held(model: PreTrainedModel, cache: DynamicCache, tokens: int) -> Held:
    """What is left of `tokens` tokens; head-wise presses mask pairs in attention and leave them in the cache."""
    cached = masked = 0
    for layer, keys in zip(model.model.layers, (layer.keys for layer in cache.layers)):
        cached += keys.shape[1] * keys.shape[2]
        indices = getattr(layer.self_attn, "masked_key_indices", None)
        masked += 0 if indices is None else len(indices[0])
    full = len(cache.layers) * model.config.num_key_value_heads * tokens
    return Held(cached / full, (cached - masked) / full)


class Reader:
    """Reads on from a compressed cache of `tokens` tokens; `close` leaves the cache as it was."""

    def __init__(self, model: PreTrainedModel, cache: DynamicCache, tokens: int):
        self.model, self.cache, self.place = model, cache, tokens
        self.lengths = [layer.keys.shape[2] for layer in cache.layers]

    def read(self, ids: list[int]) -> torch.Tensor:
        """Logits [vocab] after `ids`, at least one."""
        # One mask does not fit layers of different lengths; a single query needs none, and attends to the same.
        width = len(ids) if len(set(self.lengths)) == 1 else 1
        for start in range(0, len(ids), width):
            piece = ids[start : start + width]
            positions = torch.arange(self.place, self.place + len(piece))[None]
            self.place += len(piece)
            out = self.model(
                torch.tensor([piece]), position_ids=positions, past_key_values=self.cache, logits_to_keep=1
            )
        return out.logits[0, -1]

    def close(self) -> None:
        for layer, length in zip(self.cache.layers, self.lengths):
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]


def matched(reader: Reader, question: dict[str, Any]) -> int:
    """Leading tokens of the answer that greedy decoding gives."""
    answer = question["answer"]
    logits, right = reader.read(question["ids"]), 0
    while right < len(answer) and int(logits.argmax()) == answer[right]:
        right += 1
        if right < len(answer):
            logits = reader.read([answer[right - 1]])
    return right


def written(reader: Reader, question: dict[str, Any], tokenizer: Any, ends: set[int]) -> str:
    """Greedy text until it ends, has `new_tokens` or holds all references."""
    logits, ids = reader.read(question["ids"]), []
    while len(ids) < question["new_tokens"] and (token := int(logits.argmax())) not in ends:
        ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=True).lower()
        if all(one.lower() in text for one in question["references"]) or len(ids) == question["new_tokens"]:
            break
        logits = reader.read([token])
    return tokenizer.decode(ids, skip_special_tokens=True)


def nats(reader: Reader, logits: torch.Tensor, text: list[int]) -> list[float]:
    """Negative log-likelihood of each token of `text`, the first by the `logits` after the context."""
    found = []
    for place, token in enumerate(text):
        found.append(round(-float(logits.double().log_softmax(-1)[token]), 5))
        if place + 1 < len(text):
            logits = reader.read([token])
    return found


def rows(
    model: PreTrainedModel,
    tokenizer: Any,
    prefill: Prefill,
    sample: dict[str, Any],
    name: str,
    budgets: list[float | None],
) -> Iterator[dict[str, Any]]:
    """What one press does with one context at each budget; `full` is no press."""
    press = None if name == "full" else PRESSES[name]()
    tokens = len(sample["ids"])
    for budget in budgets:
        started = time.perf_counter()
        if press is not None:
            set_ratio(press, 1 - budget)
        cache = prefill.compress(press)
        shares, found = held(model, cache, tokens)._asdict(), []
        for question in sample["questions"]:
            reader = Reader(model, cache, tokens)
            if "answer" in question:
                found.append({"matched": matched(reader, question), "expected": len(question["answer"])})
            elif "text" in question:
                found.append({"nats": nats(reader, prefill.logits, question["text"])})
            else:
                found.append({"text": written(reader, question, tokenizer, ends_of(model, tokenizer))})
            reader.close()
        yield {
            "press": name,
            "budget": budget,
            "family": sample["family"],
            "context": sample["context"],
            **shares,
            **{key: [one[key] for one in found] for key in found[0]},
            "seconds": round(time.perf_counter() - started, 3),
        }


def ends_of(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """Tokens that end a text."""
    ends = model.generation_config.eos_token_id
    return {
        token for token in (*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id) if token is not None
    }


class Store:
    """Rows in an appended file, one JSON line each."""

    def __init__(self, path: Path):
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        self.path = path
        self.done = {self.key(row) for row in found if "error" not in row}
        self.failed = {row["press"] for row in found if "error" in row}

    @staticmethod
    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["press"], row["budget"], row["family"], row["context"]

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, and put it on disk."""
        if "error" in row:
            self.failed.add(row["press"])
        else:
            self.done.add(self.key(row))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


@torch.no_grad()
def run_context(
    model: PreTrainedModel, tokenizer: Any, sample: dict[str, Any], names: list[str], budgets: list[float], store: Store
) -> None:
    """All rows of one context that are missing."""
    prefill = None
    for name in names:
        wanted = [None] if name == "full" else budgets
        left = [b for b in wanted if (name, b, sample["family"], sample["context"]) not in store.done]
        if not left or name in store.failed:
            continue
        prefill = prefill or Prefill(model, torch.tensor([sample["ids"]]))
        try:
            for row in rows(model, tokenizer, prefill, sample, name, left):
                store.add(row)
        except Exception as error:
            if any(name == press for press, *_ in store.done):
                raise
            store.add({"press": name, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path)
    options.add_argument("--presses", help="these alone, separated by semicolons; `--presses=-NAME` leaves one out")
    options.add_argument("--families", help="these alone, separated by commas")
    options.add_argument("--contexts", type=int, help="the first contexts of each family alone")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    content = json.loads((arguments.folder / "samples.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(arguments.folder / "model", dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder / "model", local_files_only=True)
    model.eval()
    chosen = arguments.presses.split(";") if arguments.presses else []
    out = {name[1:] for name in chosen if name.startswith("-")}
    names = [name for name in chosen if not name.startswith("-")] or [n for n in ("full", *PRESSES) if n not in out]
    samples = [s for s in content["samples"] if arguments.contexts is None or s["context"] < arguments.contexts]
    if arguments.families:
        samples = [s for s in samples if s["family"] in arguments.families.split(",")]
    store = Store(arguments.folder / "kvpress.jsonl")
    began = time.perf_counter()
    for number, sample in enumerate(samples, 1):
        run_context(model, tokenizer, sample, names, content["budgets"], store)
        minutes = (time.perf_counter() - began) / 60
        left = minutes / number * (len(samples) - number)
        print(f"{number} of {len(samples)} contexts, {minutes:.1f} minutes, {left:.0f} to go", flush=True)


if __name__ == "__main__":
    main()
