#!/usr/bin/env bash
# bash tools/check_lm_eval.sh [CHECKPOINT]: lm-evaluation-harness on a checkpoint of ours, without network.
#
# Makes an environment of its own over the one of the tests (the harness is large), writes three local tasks
# over Python's own sources, and runs them on CHECKPOINT (default: runs/tiny/checkpoints of the quick start).
# Prints the harness's results as JSON. Needs a network for its first call only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
prepare_environment test
export OMP_NUM_THREADS=1 HF_DATASETS_OFFLINE=1 HF_HUB_OFFLINE=1

checkpoint=${1:-runs/tiny/checkpoints}
if [ ! -e "$checkpoint" ]; then
    echo "error: $checkpoint is not there: give a checkpoint, or run tools/quickstart.sh first" >&2
    exit 2
fi
version=0.4.13
place=${YUAN_CHECKS:-build/checks}/lm_eval-$version
lent=$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
if ! grep -qsx "$lent" "$place/done"; then
    echo "installing lm_eval $version into $place"
    rm -rf "$place"
    python -m venv "$place"
    own=$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    echo "$lent" >"$own/zz_lent.pth" # after its own packages in the order of search
    "$place/bin/python" -m pip install --quiet --disable-pip-version-check \
        "lm_eval==$version" "transformers==5.23.0" # the lender has an older one, which its other packages refuse
    echo "$lent" >"$place/done"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HOME=$work/home
# The editable install of this repository is found by a hook of the lender's; here its folders are named.
export PYTHONPATH=$PWD:$PWD/tools/types
"$place/bin/python" - "$work/tasks" <<'PYTHON'
import json, pathlib, sys
sys.path.insert(0, "tools")
from lm_eval_yuan import write_local_task
folder = pathlib.Path(json.__file__).parent
texts = [path.read_text(encoding="utf-8")[:3000] for path in sorted(folder.glob("*.py"))]
write_local_task(pathlib.Path(sys.argv[1]), texts)
PYTHON
"$place/bin/python" tools/lm_eval_yuan.py --checkpoint "$checkpoint" --include "$work/tasks" \
    --tasks yuan_texts yuan_ends yuan_writes
