"""A real model and the samples of its long table, as files that any environment can read.

    python -m benchmarks.peers.export_real smollm2 --texts FOLDER  # writes runs/peers_smollm2/model and samples.json

The same contexts and questions as `real_table.py` asks with the same options. Token ids, so that no tokenizer stands between the sides.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.lib.places import ROOT
from benchmarks.lib.real_model import MODELS, fetch
from benchmarks.quality.real_table import BUDGETS, NEEDLES, WHOLE, tasks_of
from semkv.cli.common import quiet_libraries, whole_numbers
from semkv.cli.models import load_weights
from semkv.evaluation.tasks.base import Task
from semkv.io.cache_folder import cache_folder


def samples(tokenizer: Any, tasks: dict[str, Task], length: int) -> list[dict[str, Any]]:
    """Contexts in the order in which a run goes through them: a text, then a question of each needle task."""
    found = []
    for index in range(max(WHOLE.questions, WHOLE.texts)):
        for name in ("perplexity", *NEEDLES):
            if index >= (WHOLE.texts if name == "perplexity" else WHOLE.questions):
                continue
            sample = tasks[name].make(tokenizer, length, index, seed=0, questions=1)
            (question,) = sample.questions
            asked = {"ids": question.ids}
            if name == "perplexity":
                asked["text"] = question.answer
            else:
                asked |= {"references": question.references, "new_tokens": question.new_tokens}
            found.append({"family": f"{name} {length}", "context": index, "ids": sample.ids, "questions": [asked]})
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("model", choices=MODELS)
    options.add_argument("--texts", type=Path, help="as in real_table.py")
    options.add_argument("--haystack", type=Path, help="as in real_table.py")
    options.add_argument("--lengths", default="2K,4K", help="tokens of context (%(default)s)")
    options.add_argument("--tokens", type=int, default=64, help="that are read behind each text (%(default)s)")
    options.add_argument("--folder", type=Path, help="where the files go (runs/peers_MODEL)")
    asked = options.parse_args()
    folder = asked.folder or ROOT / "runs" / f"peers_{asked.model}"
    quiet_libraries()
    model, tokenizer = load_weights(str(fetch(MODELS[asked.model], cache_folder() / "models")))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    tasks = tasks_of(asked.model, asked.texts, asked.haystack, asked.tokens)
    found = [one for length in whole_numbers(asked.lengths, "--lengths") for one in samples(tokenizer, tasks, length)]
    (folder / "samples.json").write_text(json.dumps({"budgets": BUDGETS, "samples": found}), encoding="utf-8")
    print(f"wrote {folder / 'model'} and {len(found)} contexts in {folder / 'samples.json'}")


if __name__ == "__main__":
    main()
