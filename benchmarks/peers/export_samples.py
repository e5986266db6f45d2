"""The bundled checkpoint and the samples of our grid, as files that any environment can read.

    python -m benchmarks.peers.export_samples  # writes runs/peers/model and runs/peers/samples.json

Token ids, so that no tokenizer stands between the two sides.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.peers.setting import BUDGETS, FOLDER, grid
from semkv import bundled
from semkv.cli.common import quiet_libraries
from semkv.evaluation import Grid
from semkv.evaluation.samples import make_sample


def samples(tokenizer: Any, cells: Grid) -> list[dict[str, Any]]:
    """Each context of `cells` with the questions that are asked of it, in the order in which a run goes through them."""
    found = []
    for length in cells.lengths:
        for index in range(cells.contexts):
            for family in cells.families:
                sample = make_sample(
                    tokenizer, family, length, index, seed=cells.seed, questions=cells.questions_per_context
                )
                questions = [{"ids": q.ids, "answer": q.answer} for q in sample.questions[: cells.asked(index)]]
                found.append({"family": family, "context": index, "ids": sample.ids, "questions": questions})
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--folder", type=Path, default=FOLDER, help="where the model and the samples go")
    folder = options.parse_args().folder
    quiet_libraries()
    model, tokenizer = bundled.load()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    content = {"budgets": BUDGETS, "samples": samples(tokenizer, grid())}
    (folder / "samples.json").write_text(json.dumps(content), encoding="utf-8")
    print(f"wrote {folder / 'model'} and {len(content['samples'])} contexts in {folder / 'samples.json'}")


if __name__ == "__main__":
    main()
