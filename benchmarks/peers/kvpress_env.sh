#!/usr/bin/env bash
# An environment of its own for kvpress, which needs an older transformers than semkv: runs/peers/env, or the folder given.
#
#   bash benchmarks/peers/kvpress_env.sh [FOLDER]
#
# PYTHON names the interpreter that makes it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-$here/../../runs/peers/env}
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements-kvpress.txt"
"$folder/bin/python" -c 'import kvpress, transformers; print("kvpress, with transformers", transformers.__version__)'
