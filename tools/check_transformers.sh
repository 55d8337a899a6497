#!/usr/bin/env bash
# bash tools/check_transformers.sh [version ...]: checks an exported model in releases of transformers.
#
# Exports the small golden checkpoints, a dense one and one with experts. For each release it creates an environment on top of the tests'
# environment (which provides PyTorch) and runs tools/check_export.py there: logits, greedy tokens with and
# without cache, beams, a padded batch. YUAN_TOKENIZER=FILE (Yuan's tokenizer.model, with expected_ids.json in
# the same folder) checks the exported tokenizer too. The first call of each release needs a network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
prepare_environment test
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

versions=("$@")
if [ "${#versions[@]}" = 0 ]; then versions=(4.36.2 4.46.3 5.23.0); fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HOME=$work/home
golden=tests/golden/yuan_hf_tiny_a
experts=tests/golden/yuan_m32_hf_tiny_a
options=()
if [ -n "${YUAN_TOKENIZER:-}" ]; then
    options=(--ids "$(dirname "$YUAN_TOKENIZER")/expected_ids.json")
fi
yuan-train import-hf "$golden" --out "$work/checkpoint"
yuan-train export-hf "$work/checkpoint" --out "$work/export" ${YUAN_TOKENIZER:+--tokenizer "$YUAN_TOKENIZER"}

yuan-train import-hf $experts --out "$work/m32" --rope-base 10000
yuan-train export-hf "$work/m32" --out "$work/m32-export"

base_packages=$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
failed=()
for version in "${versions[@]}"; do
    venv=${YUAN_CHECKS:-build/checks}/transformers-$version
    if ! grep -qsx "$base_packages" "$venv/done"; then
        echo "installing transformers $version into $venv"
        rm -rf "$venv"
        python -m venv "$venv"
        own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
        echo "$base_packages" >"$own/zz_base.pth" # searched after the environment's own packages
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "transformers==$version"
        echo "$base_packages" >"$venv/done"
    fi
    "$venv/bin/python" tools/check_export.py "$work/export" $golden/expected.safetensors \
        ${options[@]+"${options[@]}"} || failed+=("$version")
    "$venv/bin/python" tools/check_export.py "$work/m32-export" $experts/expected.safetensors --tolerance 1e-4 ||
        failed+=("$version, experts")
done
if [ "${#failed[@]}" -gt 0 ]; then
    echo "error: failed: ${failed[*]}" >&2
    exit 1
fi
