"""Layouts of the kernel of mixed attention on a GPU: how long the device takes for each, beside SDPA on the same bytes.

    python -m benchmarks.speed.layout_sweep                 # on CUDA: the shapes of Llama-3.1-8B in bfloat16
    python -m benchmarks.speed.layout_sweep --deadline 60   # seconds after which no further layout begins

The defaults of `Configuration` are read off it. One query token per row; entries in three blocks, with coarse ones or without, as in
`mixed_attention.py`. Times are the device's alone (`semkv.kernels.timing`). Each layout runs with the splits that it chooses and with
two and four times as many.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.mixed_attention import LLAMA, RESULTS, launched, make
from semkv.evaluation.environment import describe, now
from semkv.kernels.mixed_attention.configuration import Configuration
from semkv.kernels.mixed_attention.triton import mixed_attention_launches
from semkv.kernels.timing import device_us

SHAPES = ((65536, 2, 0), (131072, 1, 0), (6554, 1, 0), (6554, 1, 1638))
"""Exact entries, rows, coarse entries."""
LAYOUTS = (
    Configuration(),
    Configuration(block=64),
    Configuration(block=64, registers=128),
    *(
        Configuration(block=block, warps=2, stages=stages, registers=255)
        for block, stages in ((32, 3), (32, 4), (16, 4))
    ),
    *(
        Configuration(block=block, stages=stages, registers=255)
        for block, stages in ((16, 6), (32, 3), (32, 4), (32, 6), (64, 3), (64, 4), (128, 2), (128, 3))
    ),
    *(Configuration(block=block, stages=stages, registers=168) for block in (32, 64) for stages in (3, 4)),
    *(
        Configuration(block=block, warps=8, stages=stages, registers=128)
        for block, stages in ((64, 3), (64, 4), (128, 2), (128, 3), (128, 4))
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deadline", type=float, default=300.0)
    parser.add_argument("--out", type=Path, default=RESULTS.parent / "layout_sweep.json")
    given = parser.parse_args()
    started, begun = now(), time.monotonic()
    device, scale = torch.device("cuda"), LLAMA[2] ** -0.5
    torch.set_grad_enabled(False)
    rows: list[dict[str, Any]] = []
    for layout in (None, *LAYOUTS):
        for shape in SHAPES:
            if time.monotonic() - begun > given.deadline:
                break
            call = make(LLAMA, *shape, device, torch.bfloat16)
            if layout is None:
                sdpa = torch.nn.functional.scaled_dot_product_attention
                run = partial(sdpa, call.q, call.k, call.v, scale=scale, enable_gqa=True)
                run()
                rows.append(told(shape, "SDPA", {}, device_us(run, device)))
                continue
            _, made = mixed_attention_launches(*call.arguments, scale=scale, configuration=layout)
            for splits in (made[0].constants["SPLITS"] * times for times in (1, 2, 4)):
                tried = replace(layout, splits=splits)
                try:
                    run = launched(call, tried, scale)
                    run()
                    rows.append(told(shape, "semkv", asdict(tried), device_us(run, device)))
                except Exception as error:
                    if type(error).__name__ != "OutOfResources":
                        raise
    report = {"shape": LLAMA, "dtype": "bfloat16", "rows": rows}
    report |= {"environment": describe(started, "cuda").model_dump(mode="json")}
    given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def told(shape: tuple[int, int, int], reader: str, layout: dict[str, int], us: float) -> dict[str, Any]:
    """One row of the results, printed."""
    entries, rows, coarse = shape
    print(f"{entries:>7} entries, {rows} rows, {coarse:>5} coarse: {us:>8.1f} us  {reader} {layout}", flush=True)
    return {"entries": entries, "rows": rows, "coarse": coarse, "reader": reader, **layout, "us": us}


if __name__ == "__main__":
    main()
