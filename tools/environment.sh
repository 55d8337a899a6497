# Sourced by quickstart.sh and test.sh, from the repository's root.
#
#   prepare_environment core|test
#
# makes or reuses a virtual environment (.venv, or $YUAN_VENV), installs what constraints.txt pins, and activates
# it. A stamp in the environment keeps the second call from installing again.

prepare_environment() {
    local wanted=$1 venv=${YUAN_VENV:-.venv} python stamp extras="" started=$SECONDS
    python=$(find_python) || return 1
    if ! "$venv/bin/python" -c '' 2>/dev/null; then
        echo "making the virtual environment $venv with $("$python" --version)"
        if ! "$python" -m venv "$venv"; then
            echo "error: $python cannot make a virtual environment; install its venv module" \
                "(Debian and Ubuntu: apt-get install python3-venv)" >&2
            return 1
        fi
    fi
    stamp=$("$venv/bin/python" - "$PWD" <<'PYTHON'
import hashlib, pathlib, sys
files = [pathlib.Path(name).read_bytes() for name in ("setup.py", "constraints.txt", "pyproject.toml")]
print(hashlib.sha256(b"\0".join([*files, sys.argv[1].encode(), sys.version.encode()])).hexdigest())
PYTHON
    )
    if [ "$wanted" = test ]; then extras="[test]"; fi
    # An environment for the tests is enough for `core`.
    if ! grep -qsx "$stamp" "$venv/yuan-$wanted" && ! grep -qsx "$stamp" "$venv/yuan-test"; then
        echo "installing yuan-train$extras into $venv (some minutes the first time, for PyTorch)"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
            -c constraints.txt -e ".$extras" || {
            echo "error: pip could not install; its message is above" >&2
            return 1
        }
        echo "$stamp" >"$venv/yuan-$wanted"
        echo "installed in $((SECONDS - started)) s"
    fi
    VIRTUAL_ENV=$(cd "$venv" && pwd)
    PATH="$VIRTUAL_ENV/bin:$PATH"
    export VIRTUAL_ENV PATH
    unset PYTHONHOME
}

# Print the first Python of 3.11 or later; $YUAN_PYTHON selects one instead.
find_python() {
    local name
    for name in ${YUAN_PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return 0
        fi
    done
    if [ -n "${YUAN_PYTHON:-}" ]; then
        echo "error: YUAN_PYTHON=$YUAN_PYTHON is not Python 3.11 or later" >&2
    else
        echo "error: wanted Python 3.11 or later; found" \
            "$(python3 --version 2>&1 || echo none). Install one, or name it: YUAN_PYTHON=/path/to/python" >&2
    fi
    return 1
}
