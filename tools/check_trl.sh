#!/usr/bin/env bash
# bash tools/check_trl.sh [--golden FILE]: holds our losses against TRL's own, on the same model and samples.
#
# Installs TRL in an environment on top of the tests' environment (which provides PyTorch) and runs
# tools/check_trl.py there: the loss and the gradient of every parameter within 1e-5. With --golden it also
# writes the numbers that the main tests compare with (tests/golden/trl_losses.json). The first call needs a
# network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
prepare_environment test
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

trl=1.16.0
transformers=5.23.0
venv=${YUAN_CHECKS:-build/checks}/trl-$trl-$transformers
base_packages=$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
if ! grep -qsx "$base_packages" "$venv/done"; then
    echo "installing trl $trl and transformers $transformers into $venv"
    rm -rf "$venv"
    python -m venv "$venv"
    own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    echo "$base_packages" >"$own/zz_base.pth" # searched after the environment's own packages
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        "trl==$trl" "transformers==$transformers"
    echo "$base_packages" >"$venv/done"
fi
# Ours is installed editable in the base, which the file above does not lead to.
PYTHONPATH="$PWD:$PWD/tools/types${PYTHONPATH:+:$PYTHONPATH}" "$venv/bin/python" tools/check_trl.py "$@"
