#!/usr/bin/env bash
# Creates or refreshes .venv: `scripts/setup.sh all` to run the suite, `scripts/setup.sh dev` to work on it.
# Does nothing when nothing changed since the last time. PYTHON names the interpreter; else the newest that fits.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/apt.sh
wanted=${1:-dev}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

say() { echo "setup: $*"; }

fail() {
    echo "setup: $*" >&2
    exit 1
}

state_of() { echo "$PWD $(cat "requirements/$1.txt" pyproject.toml scripts/setup.sh | cksum)"; }

# Whether .venv holds the interpreter that was asked for, if one was.
is_chosen() { [ -z "${PYTHON:-}" ] || [ "$(.venv/bin/python --version 2>&1)" = "$("$PYTHON" --version 2>&1)" ]; }

# An environment for development is also one to run in.
is_done() {
    is_chosen || return 1
    for level in "$wanted" dev; do
        [ "$(cat ".venv/.setup-$level" 2>/dev/null)" = "$(state_of "$level")" ] && return 0
    done
    return 1
}

fits() { "$1" -c 'import sys, ssl, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1; }

has_pip() { "$1" -c 'import ensurepip' >/dev/null 2>&1; }

choose_python() {
    if [ -n "${PYTHON:-}" ]; then
        fits "$PYTHON" || fail "$PYTHON is no Python 3.11, 3.12, 3.13 or 3.14."
        echo "$PYTHON"
        return
    fi
    local fallback=
    for candidate in python3.14 python3.13 python3.12 python3.11 python3; do
        fits "$candidate" || continue
        ! has_pip "$candidate" || { echo "$candidate" && return; }
        fallback=${fallback:-$candidate}
    done
    [ -n "$fallback" ] || fail "no Python 3.11 to 3.14 found: install one, or name it with make PYTHON=/path/to/python."
    echo "$fallback"
}

# Debian ships Python without pip; its wheel is a package of its own and runs without being installed.
add_pip() {
    "$1" -m pip --python .venv/bin/python install --quiet --ignore-installed pip 2>/dev/null && return
    unpack_packages "$PWD/.venv/opt/pip" python3-pip-whl >/dev/null 2>&1 || return
    local wheel
    wheel=$(find .venv/opt/pip -name 'pip-*.whl' | head -n 1)
    .venv/bin/python "$wheel/pip" install --quiet --no-index "$wheel"
}

is_usable() { fits .venv/bin/python && is_chosen && .venv/bin/python -m pip --version >/dev/null 2>&1; }

create() {
    local python
    python=$(choose_python)
    say "creating .venv with $("$python" --version)"
    if has_pip "$python"; then
        "$python" -m venv --clear .venv
    else
        "$python" -m venv --clear --without-pip .venv
        add_pip "$python" || fail "$python has no pip: install the package python3-venv, or name another with make PYTHON=..."
    fi
}

# A line that grows on a terminal, a line for every 20 packages elsewhere.
show_progress() {
    local total=$1 done=0 word name rest
    while read -r word name rest; do
        case $word in
            Ignoring) total=$((total - 1)) ;;
            Collecting | Requirement)
                done=$((done + 1))
                if [ -t 1 ]; then
                    printf '\r\033[Ksetup: %d of %d packages  %s' "$done" "$total" "$name"
                elif [ $((done % 20)) = 0 ]; then
                    say "$done of $total packages"
                fi
                ;;
            Installing)
                [ ! -t 1 ] || printf '\r\033[K'
                say "unpacking"
                ;;
        esac
    done
}

install() {
    local log=.venv/setup.log total
    total=$(grep -c '==' "requirements/$wanted.txt")
    say "installing requirements/$wanted.txt"
    .venv/bin/python -m pip install --require-hashes -r "requirements/$wanted.txt" 2>&1 | tee "$log" | show_progress "$total" ||
        { tail -n 8 "$log" >&2 && fail "pip could not install requirements/$wanted.txt; all of its output is in $log."; }
    # Before it was called sluice-llm the project was installed under a name that belongs to another project on the index.
    .venv/bin/python -m pip uninstall --quiet --yes sluice >"$log" 2>&1 || true
    # With a path entry, not an import hook: the hook comes after the working directory, where a clone called `sluice`
    # would be found first.
    .venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --config-settings editable_mode=compat \
        -e . >"$log" 2>&1 ||
        { tail -n 8 "$log" >&2 && fail "pip could not install the project itself; all of its output is in $log."; }
}

! is_done || exit 0
is_usable || create
install
state_of "$wanted" >".venv/.setup-$wanted"
say "done in $SECONDS s"
