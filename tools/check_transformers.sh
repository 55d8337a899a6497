#!/usr/bin/env bash
# bash tools/check_transformers.sh [version ...]: an exported model in the real transformers, old and current.
#
# Exports the small golden checkpoint and, for each release, makes an environment of its own over the one of
# the tests (which lends it PyTorch), and runs tools/check_export.py there: logits, greedy tokens with and
# without cache, beams, a padded batch. YUAN_TOKENIZER=FILE (Yuan's tokenizer.model, with expected_ids.json
# beside it) checks the exported tokenizer too. Needs a network for the first call of each release.
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
options=()
if [ -n "${YUAN_TOKENIZER:-}" ]; then
    options=(--ids "$(dirname "$YUAN_TOKENIZER")/expected_ids.json")
fi
yuan-train import-hf "$golden" --out "$work/checkpoint"
yuan-train export-hf "$work/checkpoint" --out "$work/export" ${YUAN_TOKENIZER:+--tokenizer "$YUAN_TOKENIZER"}

lent=$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
failed=()
for version in "${versions[@]}"; do
    place=${YUAN_CHECKS:-build/checks}/transformers-$version
    if ! grep -qsx "$lent" "$place/done"; then
        echo "installing transformers $version into $place"
        rm -rf "$place"
        python -m venv "$place"
        own=$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
        echo "$lent" >"$own/zz_lent.pth" # after its own packages in the order of search
        "$place/bin/python" -m pip install --quiet --disable-pip-version-check "transformers==$version"
        echo "$lent" >"$place/done"
    fi
    "$place/bin/python" tools/check_export.py "$work/export" $golden/expected.safetensors \
        ${options[@]+"${options[@]}"} || failed+=("$version")
done
if [ "${#failed[@]}" -gt 0 ]; then
    echo "error: failed: ${failed[*]}" >&2
    exit 1
fi
