#!/usr/bin/env bash
# bash tools/test.sh [pytest arguments]: format, lint, types and tests, in a virtual environment.
#
# Needs Python 3.11 or later, and a network for the first call. Every check runs, even if an earlier one failed;
# the exit code is 1 if any of them failed. YUAN_VENV names another folder than .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
prepare_environment test
export OMP_NUM_THREADS=1

failed=()
check() {
    local name=$1
    shift
    echo "== $name: $*"
    "$@" || failed+=("$name")
}

# pyright is a program for Node.js, and its pip package fetches the rest of itself when it first runs.
check_types() {
    if pyright --version >/dev/null 2>&1; then
        check types pyright
        return
    fi
    echo "== types: NOT CHECKED: pyright cannot start; it needs npm's registry once, to fetch itself:" >&2
    pyright --version 2>&1 | tail -n 3 >&2 || true
    if [ "${CI:-}" = true ]; then
        failed+=("types")
    else
        skipped="types were not checked (pyright cannot start; see above)"
    fi
}

skipped=""
check format ruff format --check .
check lint ruff check .
check_types
# More workers than cores: tests that wait for a time-out leave theirs idle. Workers take whole runs of tests, whose
# module fixtures they share, and steal from each other at the end. What is marked slow is left out: the machine code
# that torch.compile makes takes minutes of a compiler (`bash tools/test.sh -m slow` runs it).
check tests python -m pytest -n 3 --dist worksteal -q -m "not slow" "$@"

if [ -n "$skipped" ]; then
    echo "note: $skipped" >&2
fi
if [ "${#failed[@]}" -gt 0 ]; then
    echo "error: failed: ${failed[*]}" >&2
    exit 1
fi
