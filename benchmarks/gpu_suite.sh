#!/usr/bin/env bash
# Everything that needs a GPU, in one call: install the tree, run the tests marked `gpu`, check the kernels, measure.
#
#   bash benchmarks/gpu_suite.sh              on a CUDA machine; needs a Python with torch and the packages of setup.cfg
#   bash benchmarks/gpu_suite.sh --dry-run    on a CPU: that every step runs, with tiny sizes; no figures
#
# The tree is installed into a folder of its own (no index is asked), so it may be read-only. Results go to $OUT, or to
# benchmarks/results/: gpu_suite.json (each step, its exit status and time) and the benchmarks' own files. PYTHON names the
# interpreter. A step that fails does not stop the others; the exit status is 1 if any failed. A short table comes last.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DRY=0
[ "${1:-}" = "--dry-run" ] && DRY=1
PYTHON=${PYTHON:-python3}
RESULTS=${OUT:-benchmarks/results}
mkdir -p "$RESULTS"
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
LOG="$WORK/steps.jsonl"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

if [ "$DRY" = 0 ] && ! "$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_suite: $PYTHON sees no CUDA device; pass --dry-run to try the steps on a CPU" >&2
    exit 2
fi

# step NAME COMMAND...: run, note exit status and seconds, keep going
step() {
    local name=$1 began status
    shift
    echo "== $name: $*"
    began=$(date +%s)
    "$@"
    status=$?
    echo "{\"step\": \"$name\", \"status\": $status, \"seconds\": $(($(date +%s) - began))}" >>"$LOG"
}

install() {
    mkdir -p "$WORK/tree" && cp -R setup.cfg pyproject.toml README.md LICENSE semkv_compile passes kernels profiles "$WORK/tree/" &&
        "$PYTHON" -m pip install --quiet --no-deps --no-build-isolation --no-index --target "$WORK/site" "$WORK/tree"
}

step install install
export PYTHONPATH="$WORK/site${PYTHONPATH:+:$PYTHONPATH}"

if [ "$DRY" = 1 ]; then
    step tests "$PYTHON" -m pytest --import-mode=importlib -q -p no:cacheprovider tests/gpu
    step decode_step "$PYTHON" benchmarks/decode_step.py --dry-run --out "$RESULTS/decode_step.json"
else
    step tests "$PYTHON" -m pytest --import-mode=importlib -q -p no:cacheprovider -m gpu tests
    step kernels "$PYTHON" -m pytest --import-mode=importlib -q -p no:cacheprovider tests/kernels
    step decode_step "$PYTHON" benchmarks/decode_step.py --out "$RESULTS/decode_step.json"
    step decode_step_rows "$PYTHON" benchmarks/decode_step.py --rows 8 --lengths 4096 --out "$RESULTS/decode_step_rows.json"
fi

"$PYTHON" - "$LOG" "$RESULTS/gpu_suite.json" "$DRY" <<'END'
import json, pathlib, platform, sys

import torch

steps = [json.loads(line) for line in pathlib.Path(sys.argv[1]).read_text().splitlines()]
device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
result = {"dry_run": sys.argv[3] == "1", "device": device, "torch": torch.__version__, "python": platform.python_version(), "steps": steps}
pathlib.Path(sys.argv[2]).write_text(json.dumps(result, indent=1) + "\n")
print(f"\n{device or 'CPU, dry run'}, torch {torch.__version__}")
for step in steps:
    print(f"{step['step']:20}{'ok' if step['status'] == 0 else 'FAILED ' + str(step['status']):12}{step['seconds']:6} s")
sys.exit(any(step["status"] for step in steps))
END
