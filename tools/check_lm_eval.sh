#!/usr/bin/env bash
# bash tools/check_lm_eval.sh [CHECKPOINT]: runs lm-evaluation-harness on a checkpoint, without network.
#
# Creates an environment with the harness, which is large, on top of the tests' environment; writes three
# local tasks over Python's own sources; and runs them on CHECKPOINT (default: runs/tiny/checkpoints, from the
# quick start). Prints the harness's results as JSON. Only the first call needs a network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
prepare_environment test
export OMP_NUM_THREADS=1 HF_DATASETS_OFFLINE=1 HF_HUB_OFFLINE=1

checkpoint=${1:-runs/tiny/checkpoints}
if [ ! -e "$checkpoint" ]; then
    echo "error: $checkpoint does not exist: give a checkpoint, or run tools/quickstart.sh first" >&2
    exit 2
fi
version=0.4.13
venv=${YUAN_CHECKS:-build/checks}/lm_eval-$version
base_packages=$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
if ! grep -qsx "$base_packages" "$venv/done"; then
    echo "installing lm_eval $version into $venv"
    rm -rf "$venv"
    python -m venv "$venv"
    own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    echo "$base_packages" >"$own/zz_base.pth" # searched after the environment's own packages
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        "lm_eval==$version" "transformers==5.23.0" # the base's is older, and lm_eval's dependencies reject it
    echo "$base_packages" >"$venv/done"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HOME=$work/home
# The base's .pth file of this repository's editable install is not processed here, so its folders are named.
export PYTHONPATH=$PWD:$PWD/tools/types
"$venv/bin/python" - "$work/tasks" <<'PYTHON'
import json, pathlib, sys
sys.path.insert(0, "tools")
from lm_eval_yuan import write_local_task
folder = pathlib.Path(json.__file__).parent
texts = [path.read_text(encoding="utf-8")[:3000] for path in sorted(folder.glob("*.py"))]
write_local_task(pathlib.Path(sys.argv[1]), texts)
PYTHON
"$venv/bin/python" tools/lm_eval_yuan.py --checkpoint "$checkpoint" --include "$work/tasks" \
    --tasks yuan_texts yuan_ends yuan_writes
