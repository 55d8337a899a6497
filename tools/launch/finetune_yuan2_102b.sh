#!/usr/bin/env bash
# Fine-tunes Yuan 2.0 102B on question<sep>answer lines (preprocess --convention yuan); see --help.
#
#   bash tools/launch/finetune_yuan2_102b.sh --cluster F --from runs/imported --data data/sft --tokenizer DIR --epochs 4
#
# Hyper-parameters of the paper's Table 7; loss on the answers only. Its dropout of 0.1: add model.hidden_dropout=0.1.
set -euo pipefail
name=yuan2-102b-sft
config=configs/run/yuan2-102b.yaml
overrides=(
    data.loss_after_separator=true data.fim_rate=0 data.sequence_length=4096
    train.global_batch_size=1152 train.micro_batch_size=1
    optimizer.learning_rate=8e-5 optimizer.minimum_learning_rate=8e-6 optimizer.weight_decay=0.01
    optimizer.warmup_steps=50
)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
main "$@"
