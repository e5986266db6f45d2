#!/usr/bin/env bash
# Everything that needs a GPU, in one call of under nine minutes: install the tree, run the tests marked `gpu` and those of the kernels,
# tune and measure these, measure decode steps (four layers of Llama-3.1-8B's shapes), and print a short table last.
#
#   bash benchmarks/gpu_suite.sh              on a CUDA machine; needs a Python with torch and the packages of setup.cfg
#   bash benchmarks/gpu_suite.sh --quick      the same tests, then both benchmarks with few layers and cells: that all runs, in five minutes
#   bash benchmarks/gpu_suite.sh --dry-run    on a CPU: that every step runs, with tiny sizes, kernels in Triton's interpreter; no figures
#
# Nothing is fetched. The tree, and the wheels in the folder WHEELS where it is set, are installed into a folder of their own, so
# that the tree may be read-only. Results go to $OUT, or to benchmarks/results/ (not of a quick or a dry run): gpu_suite.json (each step,
# its exit status and time) and the benchmarks' own files. PYTHON names the interpreter; else it is that of .venv, or python3. Each
# step has a time limit; one that fails or exceeds it does not stop the others, and the exit status is 1 if any did. UNTIL: seconds after
# which no cell of decode steps begins, 525. SEMKV_COMMIT: what the results are to say where the tree is no checkout.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DRY=0 QUICK=0
case "${1:-}" in
    --dry-run) DRY=1 ;;
    --quick) QUICK=1 ;;
    "") ;;
    *) echo "gpu_suite: $1: expected --quick, --dry-run or nothing" >&2 && exit 2 ;;
esac
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
RESULTS=benchmarks/results
[ "$DRY$QUICK" = 00 ] || RESULTS="$WORK/results"
RESULTS=${OUT:-$RESULTS}
mkdir -p "$RESULTS"
LOG="$WORK/steps.jsonl"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 SEMKV_CACHE="$WORK/cache"
BEGAN=$(date +%s)

if ! "$PYTHON" -c 'import torch, pytest, transformers'; then
    echo "gpu_suite: $PYTHON lacks what the suite needs: \`make env\`, or name another interpreter in PYTHON" >&2
    exit 2
fi
if [ "$DRY" = 0 ] && ! "$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_suite: $PYTHON sees no CUDA device; pass --dry-run to try the steps on a CPU" >&2
    exit 2
fi

# step NAME SECONDS COMMAND...: run for at most SECONDS, note exit status and seconds, keep going
step() {
    local name=$1 limit=$2 began status
    shift 2
    echo "== $name: $*"
    began=$(date +%s)
    timeout --kill-after=10 "$limit" "$@"
    status=$?
    echo "{\"step\": \"$name\", \"status\": $status, \"seconds\": $(($(date +%s) - began)), \"limit\": $limit}" >>"$LOG"
}

# left UNTIL: seconds from now until UNTIL seconds after the start, at least 10
left() {
    local rest=$(($1 - ($(date +%s) - BEGAN)))
    echo $((rest > 10 ? rest : 10))
}

mkdir -p "$WORK/tree" && cp -R setup.cfg pyproject.toml README.md LICENSE semkv_compile passes kernels profiles "$WORK/tree/"
PIP=("$PYTHON" -m pip install --quiet --no-deps --no-build-isolation --no-index --target "$WORK/site")
[ -n "${WHEELS:-}" ] && step wheels 60 "${PIP[@]}" "$WHEELS"/*.whl
step install 60 "${PIP[@]}" --upgrade "$WORK/tree"
export PYTHONPATH="$WORK/site${PYTHONPATH:+:$PYTHONPATH}"
if ! "$PYTHON" -c 'import semkv.api, hypothesis'; then
    echo "gpu_suite: $PYTHON lacks what semkv or its tests need (above): give their wheels in the folder WHEELS" >&2
    exit 2
fi
TESTS=("$PYTHON" -m pytest --import-mode=importlib -q -p no:cacheprovider)

if [ "$DRY" = 1 ]; then
    export OMP_NUM_THREADS=1
    step tests 60 "${TESTS[@]}" -m gpu tests/gpu
    step kernels 90 "${TESTS[@]}" tests/kernels/test_dispatch.py
    export TRITON_INTERPRET=1
    step mixed_attention 150 "$PYTHON" -m benchmarks.speed.mixed_attention --dry-run --tune --out "$RESULTS/mixed_attention.json"
    step decode_step 150 "$PYTHON" -m benchmarks.speed.decode_step --dry-run --kernels triton --out "$RESULTS/decode_step.json"
else
    # Several processes compile kernels at once where pytest can have them, each with one thread.
    "$PYTHON" -c 'import xdist' 2>/dev/null && TESTS+=(-n $(($(nproc) < 14 ? $(nproc) : 14)))
    # Of the kernels' tests those that run on the device; the others are of kernels in C++, which need no GPU.
    mapfile -t ON_DEVICE < <(grep -lw on_device tests/kernels/test_*.py)
    step tests 130 env OMP_NUM_THREADS=1 "${TESTS[@]}" --durations=8 -m "not slow" tests/gpu "${ON_DEVICE[@]}"
    TUNE=(--tune) SIZES=(--layers 4 --lengths 32768,131072,262144) UNTIL=${UNTIL:-525}
    [ "$QUICK" = 1 ] && TUNE=(--repeats 5) SIZES=(--layers 2 --lengths 32768 --steps 8) UNTIL=290
    step mixed_attention 90 "$PYTHON" -m benchmarks.speed.mixed_attention "${TUNE[@]}" --out "$RESULTS/mixed_attention.json"
    REST=$(left "$UNTIL")
    step decode_step "$REST" "$PYTHON" -m benchmarks.speed.decode_step "${SIZES[@]}" --deadline $((REST > 60 ? REST - 30 : 20)) --out "$RESULTS/decode_step.json"
fi

"$PYTHON" -m benchmarks.speed.gpu_table "$LOG" "$RESULTS" "$DRY"
