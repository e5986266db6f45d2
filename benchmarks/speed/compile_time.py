"""What importing semkv adds to importing torch, and how long the bundled model compiles: cold, and from the cache.

    python -m benchmarks.speed.compile_time --repeats 3 --json benchmarks/results/compile_time.json

Every figure is of a process of its own: wall and processor seconds, the median of the repeats. `compile` is the call alone, with
model and profile loaded and `semkv.compile` imported; `import semkv.compile` is what its first use imports beside transformers' Llama.
`load`: the machine's mean load over the last 15 minutes; where it exceeds the number of processors, wall seconds suffer from it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from semkv.evaluation.environment import describe, now

TIMED = """
import json, time
def timed(name, call):
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    out[name] = [time.perf_counter() - wall, time.process_time() - cpu]
    return result
out = {}
"""
IMPORTS = """
timed("import torch", lambda: __import__("torch"))
timed("import semkv", lambda: __import__("semkv"))
print(json.dumps(out))
"""
COMPILES = """
import semkv, sys
import transformers.models.llama.modeling_llama
timed("import semkv.compile", lambda: semkv.compile)
model, profile = semkv.bundled.load()[0], semkv.bundled.profile()
timed(sys.argv[1], lambda: semkv.compile(model, profile, budget=0.1, config=semkv.CompileConfig(cache=sys.argv[2] == "cache")))
print(json.dumps(out))
"""


def run(code: str, folder: Path, *arguments: str) -> dict[str, list[float]]:
    """What one process printed: seconds by name."""
    ran = subprocess.run(
        [sys.executable, "-c", TIMED + code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "SEMKV_CACHE": str(folder)},
    )
    return json.loads(ran.stdout.splitlines()[-1])


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """Medians over `repeats` rounds, each of all processes in turn."""
    found: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(COMPILES, folder, "fill the cache", "cache")
        for _ in range(repeats):
            for times in (
                run(IMPORTS, folder),
                run(COMPILES, folder, "compile, cold", "none"),
                run(COMPILES, folder, "compile, from the cache", "cache"),
            ):
                for key, value in times.items():
                    found.setdefault(key, []).append(value)
    return {
        key: {"wall": statistics.median(x[0] for x in values), "cpu": statistics.median(x[1] for x in values)}
        for key, values in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started = now()
    times = measure(options.repeats)
    for name, value in times.items():
        print(f"{name:28s} wall {value['wall']:6.2f} s   cpu {value['cpu']:6.2f} s")
    if options.json is not None:
        report = {
            "environment": describe(started).model_dump(mode="json"),
            "load": os.getloadavg()[2],
            "repeats": options.repeats,
            "seconds": times,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
