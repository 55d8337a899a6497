#!/usr/bin/env bash
# Fine-tunes Yuan 2.0-M32 on question<sep>answer lines (preprocess --convention yuan); see --help.
#
#   bash tools/launch/finetune_yuan2_m32.sh --cluster F --from runs/imported --data data/sft --tokenizer DIR --epochs 4
#
# The published hyper-parameters (configs/run/yuan2-m32-sft.yaml): 16,384 tokens, rotary base 40890; loss on the
# answers only. The imported model must have the same base and tables: docs/m32.md.
set -euo pipefail
name=yuan2-m32-sft
config=configs/run/yuan2-m32-sft.yaml
overrides=(data.loss_after_separator=true data.fim_rate=0)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
main "$@"
