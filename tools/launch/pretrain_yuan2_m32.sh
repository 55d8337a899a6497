#!/usr/bin/env bash
# Pretrains Yuan 2.0-M32 with the published hyper-parameters (configs/run/yuan2-m32.yaml); see --help.
set -euo pipefail
name=yuan2-m32
config=configs/run/yuan2-m32.yaml
# Fill-in-the-middle at the published rates.
overrides=(data.fim_rate=0.5 data.fim_spm_rate=0.5)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
main "$@"
