#!/usr/bin/env bash
# bash tools/quickstart.sh: from nothing to generated text in about five minutes on two CPU cores.
#
# Installs into .venv (or $YUAN_VENV); takes little stories and Python's own standard library as text; measures this
# machine; partitions a small model unevenly over three different cards, simulated by processes of this machine;
# trains it; compares the forecast with the measurement; and writes a story. Files: data/ and runs/tiny/. Existing data is kept;
# a runs/tiny of an earlier call is renamed, so that training starts from the first step.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

step() {
    echo
    echo "== [$SECONDS s] $1"
    shift
    printf '$'
    printf ' %q' "$@"
    echo
    "$@"
}

echo "== environment"
prepare_environment core
export OMP_NUM_THREADS=1
model=configs/model/tiny.yaml
config=configs/run/tiny.yaml
cluster=configs/cluster/laptop.yaml
run=runs/tiny

if [ -e data/corpus.idx ] && [ -e data/tokenizer/tokenizer.model ]; then
    echo "data/corpus and data/tokenizer exist and are kept"
else
    step "text: little stories, and the source of Python's standard library" \
        python tools/make_corpus.py --out data/corpus.jsonl --max-bytes 2500000 --stories 1500
    step "a tokenizer of 4,000 words" \
        yuan-train tokenizer --input data/corpus.jsonl --vocab-size 4000 --out data/tokenizer
    step "text to tokens" \
        yuan-train preprocess --input data/corpus.jsonl --tokenizer data/tokenizer --out data/corpus --workers 2
fi
if [ -e "$run" ]; then
    # Otherwise training would resume from its last checkpoint, at the last step.
    renamed=$run.$(date +%Y%m%d-%H%M%S)
    mv "$run" "$renamed"
    echo "an earlier run was in $run; it is now in $renamed"
fi
mkdir -p "$run"

step "measure this machine" \
    yuan-train profile --model $model --config $config --cluster $cluster --out $run/profile.json
step "partition the model over three different cards" \
    yuan-train plan --cluster $cluster --model $model --config $config --profile $run/profile.json \
    --out $run/plan.yaml --report $run/plan.html
step "train: one process per card" \
    yuan-train launch --config $config --plan $run/plan.yaml
step "results" \
    yuan-train show $run --out $run/report.html
prompt="One day"
words=(--prompt "$prompt" --max-new-tokens 40 --temperature 0.5 --seed 1)
step "a story, half trained" \
    yuan-train generate --checkpoint $run/checkpoints/step-00000025 "${words[@]}"
step "a story, as trained" \
    yuan-train generate --checkpoint $run/checkpoints "${words[@]}"
echo
echo "done in $SECONDS s; open $run/plan.html for the plan, $run/report.html for the run"
