#!/usr/bin/env bash
# bash tools/quickstart_rl.sh: from random weights to sums by rewards alone, in under five minutes on two CPU cores.
#
# Installs into .venv (or $YUAN_VENV); writes a hundred prompts `a b =`; trains a model of 100,000 parameters that
# is told nothing but how good its answers are; and draws the curve of its reward. If tools/quickstart.sh has left a
# model in runs/tiny, that one is then trained a few steps to tell of foxes. Files: data/rl/, runs/rl-tiny/ and
# runs/rl-story/; those of an earlier call are renamed.
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

set_aside() {
    if [ -e "$1" ]; then
        # Otherwise training would resume from its last checkpoint, at the last step.
        local renamed=$1.$(date +%Y%m%d-%H%M%S)
        mv "$1" "$renamed"
        echo "an earlier run was in $1; it is now in $renamed"
    fi
}

echo "== environment"
prepare_environment core
export OMP_NUM_THREADS=1

set_aside runs/rl-tiny
step "a hundred prompts: a b =" \
    python tools/rl_tasks.py make --task sum --out data/rl/sum.jsonl
step "draw answers, score them, train" \
    yuan-train rl --config configs/run/rl-tiny.yaml
step "results" \
    yuan-train show runs/rl-tiny --out runs/rl-tiny/report.html
if [ -e runs/tiny/checkpoints ] && [ -e data/tokenizer/tokenizer.model ]; then
    set_aside runs/rl-story
    step "prompts for the quick start's model" \
        python tools/rl_tasks.py make --task story --out data/rl/story.jsonl
    step "train it to tell of foxes" \
        yuan-train rl --config configs/run/rl-story.yaml
    step "results" \
        yuan-train show runs/rl-story --out runs/rl-story/report.html
fi
echo
echo "done in $SECONDS s; open runs/rl-tiny/report.html for the curve of the reward"
