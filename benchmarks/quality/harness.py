"""SmolLM2-135M in lm-evaluation-harness: its own model `hf`, and `semkv` with all of the memory and with a tenth.

    python -m benchmarks.quality.harness                # minutes on two cores; needs semkv[lm-eval,gguf]
    python -m benchmarks.quality.harness --samples 4 --methods snapkv

Two tasks of texts that every machine with Python has: its reference manual, with four numbers hidden in it, one of which is asked for. In
`numbers_choice` the four are compared by their likelihood, in `numbers_made` the number is generated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lib.grids import measured_on, table, write_document
from benchmarks.lib.places import RESULTS
from benchmarks.lib.real_model import MODELS, fetch
from benchmarks.quality.real import texts
from semkv.evaluation.environment import describe, now
from semkv.io.cache_folder import cache_folder

CHARACTERS = 5000
"""Of the manual, in each context: more than 1,000 tokens."""
THINGS = ("apples", "bridges", "candles", "drums", "engines", "feathers", "gardens", "hammers", "islands", "jackets")
COMMON = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{{{{context}}}}"
metadata:
  version: 1
"""
TASKS = {
    "numbers_choice": """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
""",
    "numbers_made": """output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 8
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_punctuation: true
filter_list:
  - name: first_number
    filter:
      - function: regex
        regex_pattern: "([0-9]+)"
      - function: take_first
""",
}
SCORE = re.compile(r"^\|(numbers_\w+) *\|[^|]*\|[^|]*\|[^|]*\|(?:acc|exact_match) *\|[^|]*\| *([\d.]+)\|", re.MULTILINE)


def samples(count: int) -> list[dict[str, Any]]:
    """Contexts of the manual with four numbers in them, and a question for one."""
    manual, draw, out = texts()["judged"]["manual"], random.Random(0), []
    for number in range(count):
        start = number * CHARACTERS
        lines = manual[start : start + CHARACTERS].splitlines()
        things, numbers = draw.sample(THINGS, 4), [str(draw.randrange(10_000, 99_999)) for _ in range(4)]
        for thing, value in zip(things, numbers):
            lines.insert(draw.randrange(len(lines)), f"The special number of the {thing} is {value}.")
        gold = draw.randrange(4)
        question = f"Question: what is the special number of the {things[gold]}?\nAnswer: The special number of the {things[gold]} is"
        text = "\n".join(lines) + "\n\n" + question
        out.append({"context": text, "answer": numbers[gold], "choices": numbers, "gold": gold})
    return out


def run(arguments: list[str], folder: Path) -> dict[str, float]:
    """The score of each task, by `semkv lm-eval` with these arguments."""
    command = [sys.executable, "-m", "semkv.cli.main", "lm-eval", *arguments, "--tasks", ",".join(TASKS)]
    print("$ semkv", *command[3:], flush=True)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--include_path", str(folder)],
        env={**os.environ, **offline},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    print(done.stdout, flush=True)
    return {name: float(value) for name, value in SCORE.findall(done.stdout)}


def publish(content: dict[str, Any]) -> Path:
    """docs/results/harness.md."""
    rows = [
        [f"`{row['label']}`", row["budget"], *(f"{100 * row['scores'][name]:.0f}" for name in TASKS)]
        for row in content["rows"]
    ]
    hf, full = (row["scores"] for row in content["rows"][:2])
    same = "The scores of `full` are those of `hf`." if hf == full else "The scores of `full` are not those of `hf`."
    first, last = content["tokens"]
    return write_document(
        "harness",
        "# SmolLM2-135M in lm-evaluation-harness",
        "Made by `benchmarks/quality/harness.py`; do not edit.",
        f"SmolLM2-135M-Instruct, {content['samples']} contexts of {first:,} to {last:,} tokens: Python's reference manual with four "
        "numbers hidden in it, one of which is asked for at the end. `numbers_choice` compares the likelihood of the four, `numbers_made` "
        "generates one; right answers in percent. `hf` is the harness's own model; `semkv` reads and compresses a context, its question "
        "included, "
        f"before the answer. {same} So few contexts say little of methods beside each other.",
        table(["model", "budget", *(f"`{name}`" for name in TASKS)], rows),
        "## Provenance",
        measured_on(content["environment"]),
    )


def main() -> None:
    """Write the tasks, run each model, write the figures and their page."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--samples", type=int, default=12, help="contexts of each task (%(default)s)")
    options.add_argument("--methods", default="streaming_llm,snapkv,quest", help="beside `full` (%(default)s)")
    options.add_argument("--budget", default="0.1", help="of the full KV (%(default)s)")
    options.add_argument(
        "--out", type=Path, help="write the figures here, in place of benchmarks/results and docs/results"
    )
    asked, started = options.parse_args(), now()
    model = fetch(MODELS["smollm2"], cache_folder() / "models")
    ours = f"pretrained={model},dtype=float32"
    runs = {
        ("hf", "-"): [
            "--model",
            "hf",
            "--model_args",
            f"pretrained={model.parent},gguf_file={model.name},dtype=float32",
        ]
    }
    runs["semkv, full", "-"] = ["--model_args", f"{ours},method=full"]
    for method in asked.methods.split(","):
        runs[f"semkv, {method}", f"{100 * float(asked.budget):g} %"] = [
            "--model_args",
            f"{ours},method={method},budget={asked.budget},floor=0",
        ]
    from semkv.cli.models import load_weights

    own = samples(asked.samples)
    _, tokenizer = load_weights(str(model))
    lengths = [len(tokenizer(one["context"]).input_ids) for one in own]
    rows = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        (folder / "data.jsonl").write_text("\n".join(map(json.dumps, own)), encoding="utf-8")
        for name, text in TASKS.items():
            (folder / f"{name}.yaml").write_text(
                COMMON.format(name=name, data=folder / "data.jsonl") + text, encoding="utf-8"
            )
        for (label, budget), arguments in runs.items():
            rows.append({"label": label, "budget": budget, "scores": run([*arguments, "--device", "cpu"], folder)})
    environment = describe(started).model_dump(mode="json") | {
        "command": " ".join(["python -m benchmarks.quality.harness", *sys.argv[1:]])
    }
    content = {"samples": len(own), "tokens": [min(lengths), max(lengths)], "rows": rows, "environment": environment}
    path = asked.out or RESULTS / "harness.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(path if asked.out else publish(content))


if __name__ == "__main__":
    main()
