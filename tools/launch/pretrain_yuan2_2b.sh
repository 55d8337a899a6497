#!/usr/bin/env bash
# Pretrains Yuan 2.0 2B with the published hyper-parameters (configs/run/yuan2-2b.yaml); see --help.
set -euo pipefail
name=yuan2-2b
config=configs/run/yuan2-2b.yaml
# Fill-in-the-middle at the published rates.
overrides=(data.fim_rate=0.5 data.fim_spm_rate=0.5)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
main "$@"
