# Sourced by the scripts in this folder. A script sets `name`, `config`, perhaps `overrides`, and calls `main "$@"`.
#
#   bash tools/launch/pretrain_yuan2_2b.sh --cluster F [--plan F] [where] [--dry-run] [key=value ...]
#
# Plans if there is no plan yet (`--plan`, by default runs/NAME/plan.yaml), then starts every rank of it. Called
# again, it resumes from the newest complete checkpoint (checkpoint.resume: auto). Where:
#
#   --local            every node of the plan on this machine (the default)
#   --hostfile FILE    over ssh, as `yuan-train launch --hostfile` (docs/launch.md)
#   --slurm            writes runs/NAME/job.sbatch, a heterogeneous job with a component per kind of node, and
#                      submits it; --sbatch "--partition=x --time=24:00:00" adds options to every component
#
# --from CKPT starts from an imported checkpoint while the run has none of its own; --data PREFIX and
# --tokenizer DIR name the corpus; --epochs N computes train.steps from its size. --dry-run prints the commands
# and runs none. Needs yuan-train on the path of every node, at the same path as here.

usage() {
    sed -n '3,/^$/s/^# \{0,1\}//p' "$(dirname "${BASH_SOURCE[0]}")/common.sh" | sed '/^[^ ]* *()/d'
}

die() {
    echo "error: $1" >&2
    exit 2
}

# Print a command as it can be typed; run it unless --dry-run.
step() {
    printf '+'
    printf ' %q' "$@"
    echo
    if [ "$dry_run" = yes ]; then return 0; fi
    "$@"
}

main() {
    cd "$(dirname "${BASH_SOURCE[0]}")/../.."
    cluster="" plan="" where=local hostfile="" dry_run=no from="" data="" tokenizer="" epochs="" sbatch_options=""
    keys=()
    while [ "$#" -gt 0 ]; do
        case $1 in
            --cluster | --plan | --hostfile | --from | --data | --tokenizer | --epochs | --sbatch)
                [ "$#" -ge 2 ] || die "$1: wanted a value"
                ;;
        esac
        case $1 in
            --cluster) cluster=$2 && shift 2 ;;
            --plan) plan=$2 && shift 2 ;;
            --local) where=local && shift ;;
            --hostfile) where=hostfile hostfile=$2 && shift 2 ;;
            --slurm) where=slurm && shift ;;
            --sbatch) sbatch_options=$2 && shift 2 ;;
            --from) from=$2 && shift 2 ;;
            --data) data=$2 && shift 2 ;;
            --tokenizer) tokenizer=$2 && shift 2 ;;
            --epochs) epochs=$2 && shift 2 ;;
            --dry-run) dry_run=yes && shift ;;
            -h | --help) usage && exit 0 ;;
            -*) die "unknown option $1; --help lists them" ;;
            *=*) keys+=("$1") && shift ;;
            *) die "$1: wanted key=value" ;;
        esac
    done
    plan=${plan:-runs/$name/plan.yaml}
    gather_keys
    make_plan
    # After a dry run there may be no plan to read the nodes from.
    if [ ! -e "$plan" ]; then
        echo "(no plan yet: the commands for its nodes are known once it is made)"
        return 0
    fi
    case $where in
        local) step yuan-train launch --config "$config" --plan "$plan" --this-node all "${all_keys[@]}" ;;
        hostfile) step yuan-train launch --config "$config" --plan "$plan" --hostfile "$hostfile" "${all_keys[@]}" ;;
        slurm) submit ;;
    esac
}

# The run's overrides: the script's own, then those of the options, then the user's.
gather_keys() {
    all_keys=("log.directory=runs/$name" "checkpoint.directory=runs/$name/checkpoints")
    all_keys+=(${overrides[@]+"${overrides[@]}"})
    if [ -n "$data" ]; then all_keys+=("data.train=[{prefix: $data}]"); fi
    if [ -n "$tokenizer" ]; then all_keys+=("data.tokenizer=$tokenizer"); fi
    if [ -n "$epochs" ]; then
        [ -n "$data" ] || die "--epochs: needs --data PREFIX to count its tokens"
        local steps
        steps=$(python tools/launch/steps.py "$config" "$data" "$epochs" \
            ${overrides[@]+"${overrides[@]}"} ${keys[@]+"${keys[@]}"}) || exit 2
        all_keys+=("train.steps=$steps" "optimizer.decay_steps=$steps")
    fi
    if [ -n "$from" ] && [ ! -e "runs/$name/checkpoints/latest" ]; then
        all_keys+=("checkpoint.resume=$from")
    fi
    all_keys+=(${keys[@]+"${keys[@]}"})
}

make_plan() {
    if [ -e "$plan" ]; then return 0; fi
    [ -n "$cluster" ] || die "$plan does not exist: give --cluster FILE to make it, or --plan FILE"
    step mkdir -p "$(dirname "$plan")"
    step yuan-train plan --cluster "$cluster" --config "$config" --out "$plan" "${all_keys[@]}"
}

submit() {
    local job=runs/$name/job.sbatch text
    text=$(yuan-train launch --slurm --print --sbatch="$sbatch_options" --config "$config" --plan "$plan" \
        "${all_keys[@]}") || exit 2
    if [ "$dry_run" = yes ]; then
        printf '+ sbatch %q    # which would hold:\n%s\n' "$job" "$text"
        return 0
    fi
    mkdir -p "runs/$name"
    printf '%s\n' "$text" >"$job"
    step sbatch "$job"
}
