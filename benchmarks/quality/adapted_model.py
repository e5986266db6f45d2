"""A model with an adapter that was trained a little, quantised in two ways: a compiled model beside the model itself.

    python -m benchmarks.quality.adapted_model                    # the bundled model: a minute; needs peft and torchao
    python -m benchmarks.quality.adapted_model --model smollm2    # SmolLM2-135M: half an hour of one core; needs semkv[gguf] as well
    python -m benchmarks.quality.adapted_model --page             # docs/results/adapted_model.md from the figures

A LoRA learns a kind of text that the model was not made for: of the bundled model, which reads records, the same records backwards; of
SmolLM2, half of Python's reference manual. The loss on other text of that kind, before and after, says that it learned something. The
model's weights are then packed by torchao, with the adapter beside them, not merged. Prompts are passages of the other text, answers what
follows them, greedily: by `model.generate`, by the compiled model with all of its memory, and with a tenth of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import semkv
from benchmarks.lib.grids import FAMILIES, measured_on, table, write_document
from benchmarks.lib.places import RESULTS
from benchmarks.lib.real_model import MODELS, fetch
from benchmarks.quality.real import texts
from semkv import bundled
from semkv.cli.models import load_weights
from semkv.evaluation.environment import describe, now
from semkv.io.cache_folder import cache_folder
from semkv.profiles.bundled.tasks import make_haystack

RESULT = RESULTS / "adapted_model.json"
PACKED = {
    "int8": ("Int8WeightOnlyConfig", {}),
    "4 bits": ("IntxWeightOnlyConfig", {"weight_dtype": torch.int4}),
}
"""By name: torchao's configuration."""
SMALL = ("snapkv", "sekv")
BUDGET, ANSWER, PIECE, LEARNING_RATE = 0.1, 16, 256, 5e-4
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def smollm2() -> tuple[nn.Module, Any, dict[str, Tensor]]:
    """A new model, its tokenizer, and texts int64 [1, n] to learn and to judge by."""
    model, tokenizer = load_weights(str(fetch(MODELS["smollm2"], cache_folder() / "models")))
    read = {purpose: tokenizer(kinds["manual"], return_tensors="pt").input_ids for purpose, kinds in texts().items()}
    return model.float(), tokenizer, read


def small() -> tuple[nn.Module, Any, dict[str, Tensor]]:
    """`smollm2` of the bundled model."""
    model, tokenizer = bundled.load()
    read = {}
    for purpose, first in (("calibration", 0), ("judged", 100)):
        found = [make_haystack(family, 2000, seed=first + n) for n in range(8) for family in FAMILIES]
        read[purpose] = torch.cat([tokenizer(one.context, return_tensors="pt").input_ids for one in found], 1).flip(1)
    return model.float(), tokenizer, read


SUBJECTS = {"bundled": ("The bundled model", small), "smollm2": ("SmolLM2-135M-Instruct", smollm2)}


def loss_of(model: nn.Module, pieces: list[Tensor]) -> float:
    """Nats per token of pieces int64 [1, t]."""
    with torch.no_grad():
        return sum(float(model(input_ids=x, labels=x).loss) for x in pieces) / len(pieces)


def train(model: nn.Module, pieces: list[Tensor], steps: int) -> None:
    """One piece a step."""
    chosen = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(chosen, lr=LEARNING_RATE)
    model.train()
    for step in range(steps):
        model(input_ids=pieces[step], labels=pieces[step]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def packed(adapter: dict[str, Tensor], model: nn.Module, kind: str) -> nn.Module:
    """`model`, its weights packed in place, with the adapter beside them."""
    import torchao.quantization as library
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    name, options = PACKED[kind]
    library.quantize_(model, getattr(library, name)(**options))
    adapted = get_peft_model(model, LoraConfig(**LORA)).eval()
    set_peft_model_state_dict(adapted, adapter)
    return adapted


def greedy(compiled: semkv.CompiledModel, state: semkv.State) -> list[int]:
    """ANSWER tokens behind a state of one row."""
    made = [int(state.logits.argmax())]
    while len(made) < ANSWER:
        made.append(int(compiled.extend(state, torch.tensor([[made[-1]]])).argmax()))
    return made


def generated(model: Any, ids: Tensor) -> list[int]:
    """ANSWER tokens by `generate`."""
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=ANSWER,
        min_new_tokens=ANSWER,
        do_sample=False,
        pad_token_id=0,
    )
    return made[0, ids.shape[1] :].tolist()


def answers(model: nn.Module, full: semkv.CompiledModel, ids: Tensor) -> dict[str, list[int]]:
    """By who answers."""
    found = {"model": generated(model, ids), "full": generated(full, ids)}
    record = full.prefill_record(ids, surprisal=True)
    for method in SMALL:
        compiled = full.with_method(method, BUDGET, config=full.settings.model_copy(update={"floor": 0}))
        found[method] = greedy(compiled, compiled.compress(record))
    return found


def publish(results: dict[str, dict[str, Any]]) -> Path:
    """docs/results/adapted_model.md."""
    parts = []
    for name, content in results.items():
        before, after = content["losses"]
        tokens = [row["tokens"] for row in content["rows"]]
        parts += [
            f"{SUBJECTS[name][0]}, with a LoRA of rank {LORA['r']}, trained for {content['steps']} steps: the loss on other text of the "
            f"kind that it learned fell from {before:.3f} to {after:.3f} nats per token. {len(tokens) // len(PACKED)} prompts of "
            f"{min(tokens):,} to {max(tokens):,} tokens.",
            table(["weights", "bytes beside float32", *(f"`{who}`" for who in ("full", *SMALL))], lines(content)),
            measured_on(content["environment"]),
        ]
    return write_document(
        "adapted_model",
        "# An adapted, quantised model",
        "Made by `benchmarks/quality/adapted_model.py`; do not edit.",
        "A model's weights are packed by torchao in two ways, with a trained adapter beside them, not merged, and compiled. Of "
        f"{ANSWER} greedy tokens after each prompt: how many answers are those of `model.generate`, and how many of their tokens, with "
        "all of the memory (`full`) and with 10 % of it. A token that differs makes those behind it differ, so few equal tokens at 10 % "
        "do not say that an answer is wrong; answers stand in [the figures](../../benchmarks/results/adapted_model.json).",
        *parts,
    )


def lines(content: dict[str, Any]) -> list[list[str]]:
    """A line for each way in which the weights are packed."""
    out = []
    for kind in PACKED:
        rows = [row for row in content["rows"] if row["weights"] == kind]
        shares = []
        for who in ("full", *SMALL):
            same = [sum(a == b for a, b in zip(row["answers"][who], row["answers"]["model"])) for row in rows]
            whole = sum(count == ANSWER for count in same)
            shares.append(f"{whole} of {len(rows)}, {100 * sum(same) / len(rows) / ANSWER:.0f} % of tokens")
        out.append([kind, f"{content['packed'][kind] / content['float_bytes']:.2f}", *shares])
    return out


def measure(name: str, *, prompts: int, steps: int, tokens: int) -> dict[str, Any]:
    """Train, pack, compile, ask."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    from benchmarks.quality.weights_table import nbytes

    load = SUBJECTS[name][1]
    model, tokenizer, read = load()
    learned, heldout = (list(read[purpose].split(PIECE, 1))[:-1] for purpose in ("calibration", "judged"))
    if len(learned) < steps or read["judged"].shape[1] < prompts * tokens:
        raise SystemExit(f"--steps {steps}, --prompts {prompts}: there are {len(learned)} pieces of text to learn")
    content: dict[str, Any] = {"steps": steps, "float_bytes": nbytes(model), "packed": {}, "rows": []}
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(**LORA)).eval()
    heldout = heldout[:: len(heldout) // 8][:8]
    before, began = loss_of(adapted, heldout), time.monotonic()
    train(adapted, learned[:: len(learned) // steps], steps)
    content["losses"] = [before, loss_of(adapted, heldout)]
    content["training_seconds"] = round(time.monotonic() - began)
    print(f"loss {content['losses']} after {content['training_seconds']} s", flush=True)
    adapter = {key: x.clone() for key, x in get_peft_model_state_dict(adapted).items()}
    for kind in PACKED:
        own = packed(adapter, load()[0], kind)
        full = semkv.compile(own, method="full")
        content["packed"][kind] = nbytes(own)
        for number in range(prompts):
            start = number * (read["judged"].shape[1] // prompts)
            ids = read["judged"][:, start : start + tokens - 37 * (number % 5)]
            found = answers(own, full, ids)
            row = {"weights": kind, "prompt": number, "tokens": ids.shape[1], "answers": found}
            content["rows"].append(row | {"texts": {who: tokenizer.decode(x) for who, x in found.items()}})
            equal = {who: sum(a == b for a, b in zip(x, found["model"])) for who, x in found.items()}
            print(f"{kind}, prompt {number}: tokens equal {equal}", flush=True)
    return content


def main() -> None:
    """Measure, write the figures and their page."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", choices=SUBJECTS, default="bundled", help="(%(default)s)")
    options.add_argument("--prompts", type=int, default=20, help="(%(default)s)")
    options.add_argument("--steps", type=int, default=60, help="of training (%(default)s)")
    options.add_argument("--tokens", type=int, default=1000, help="of a prompt (%(default)s)")
    options.add_argument("--page", action="store_true", help="write the page alone")
    asked, started = options.parse_args(), now()
    results = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    if not asked.page:
        warnings.simplefilter("ignore")
        content = measure(asked.model, prompts=asked.prompts, steps=asked.steps, tokens=asked.tokens)
        environment = describe(started).model_dump(mode="json")
        environment["command"] = " ".join(["python -m benchmarks.quality.adapted_model", *sys.argv[1:]])
        results[asked.model] = content | {"environment": environment}
        RESULT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(publish(results))
    if any(row["answers"]["full"] != row["answers"]["model"] for one in results.values() for row in one["rows"]):
        raise SystemExit("answers of `full` are not the model's")


if __name__ == "__main__":
    main()
