#!/bin/sh
# Runs the unit tests, or those of the arguments, and reports which branches of the product they take. Fails below the
# floor in pyproject.toml.
set -eu
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PWD/.venv/opt/redis/bin:$PATH"
[ $# -gt 0 ] || set -- tests/unit
mkdir -p build/coverage
coverage erase
coverage run -m pytest --numprocesses=4 --dist=loadfile --no-loadscope-reorder --durations=20 "$@"
coverage combine --quiet
coverage report
