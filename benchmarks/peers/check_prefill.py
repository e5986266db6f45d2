"""That a played prefill gives every press the cache of a prefill of its own; runs in the environment of kvpress.

ENV/bin/python benchmarks/peers/check_prefill.py FOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from prefill import Prefill
from presses import PRESSES, set_ratio
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

RATIO = 0.95
UNCHECKED = ("duo_attention",)  # does not run on this model


def parts(model: PreTrainedModel, cache: DynamicCache) -> list[Tensor]:
    """Keys, values and masked pairs of every layer."""
    found: list[Any] = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    for layer in model.model.layers:
        found += getattr(layer.self_attn, "masked_key_indices", None) or ()
    return found


@torch.no_grad()
def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path)
    folder = options.parse_args().folder
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, local_files_only=True).eval()
    sample = json.loads((folder / "samples.json").read_text(encoding="utf-8"))["samples"][0]
    ids = torch.tensor([sample["ids"]])
    prefill = Prefill(model, ids)
    for name, make in PRESSES.items():
        if name in UNCHECKED:
            continue
        press = make()
        set_ratio(press, RATIO)
        played = parts(model, prefill.compress(press))
        press, own = make(), DynamicCache()
        set_ratio(press, RATIO)
        with press(model):
            model.model(input_ids=ids, past_key_values=own)
        alone = parts(model, own)
        same = len(played) == len(alone) and all(torch.equal(x, y) for x, y in zip(played, alone))
        print(f"{name}: {'the same' if same else 'DIFFERENT'}", flush=True)
        if not same:
            raise SystemExit(f"{name}: the played prefill does not give what a prefill of its own gives")


if __name__ == "__main__":
    main()
