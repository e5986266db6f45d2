"""The last step of `gpu_suite.sh`: what ran, on what, and the figures that the claims are about, in a short table.

python -m benchmarks.speed.gpu_table STEPS.jsonl RESULTS_FOLDER DRY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from semkv.evaluation.environment import describe, now

LARGE = 256 << 20
"""Bytes of a call from which on it has to reach a share of the copy bandwidth."""


def main() -> int:
    steps = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    folder, dry = Path(sys.argv[2]), sys.argv[3] == "1"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = {"dry_run": dry, "environment": describe(now(), device).model_dump(mode="json"), "steps": steps}
    (folder / "gpu_suite.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"\n{name}{', dry run' if dry else ''}, torch {torch.__version__}")
    for step in steps:
        said = (
            "ok" if step["status"] == 0 else "TIMED OUT" if step["status"] in (124, 137) else f"FAILED {step['status']}"
        )
        print(f"{step['step']:20}{said:12}{step['seconds']:6} s of {step['limit']}")
    if not dry:
        for line in [*kernel_lines(folder / "mixed_attention.json"), *step_lines(folder / "decode_step.json")]:
            print(line)
    return int(any(step["status"] for step in steps))


def read(path: Path) -> dict[str, Any]:
    """The report, or nothing where its step did not come that far."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def kernel_lines(path: Path) -> list[str]:
    """Ours beside the best of the others on the same bytes."""
    out = []
    for one in (found := read(path).get("lines", [])):
        if one["reader"] != "semkv":
            continue
        others = [x["us"] for x in found if x["reader"] in ("SDPA", "FlashInfer") and x["nbytes"] == one["nbytes"]]
        best = f"{one['us'] / min(others):.2f} of the best other's time" if others else "no other"
        bar = "bar 80 %" if one["nbytes"] >= LARGE else "bar 1.25"
        out.append(
            f"attention {one['entries']:>6} entries, {one['rows']:>3} rows: {one['share']:.0%} of copy, {best} ({bar})"
        )
    return out


def step_lines(path: Path) -> list[str]:
    """A line per cell that was measured, with its time over the floor."""
    out = []
    for one in read(path).get("results", []):
        cell = one["cell"]
        start = f"{cell['name']:24}{cell['tokens']:>8} tokens,{cell['rows']:>3} rows, budget {cell['budget'] or '-'}: "
        if one["missing"] is not None:
            out.append(start + "missing, " + one["missing"][:60])
        elif one["first_ms"] is not None:
            out.append(start + f"first token after {one['first_ms']:.0f} ms")
        else:
            ratio = one["median_ms"] / one["floor_ms"]
            out.append(start + f"{one['median_ms']:.2f} ms, p99 {one['p99_ms']:.2f}, {ratio:.2f} of the floor")
    return out


if __name__ == "__main__":
    sys.exit(main())
