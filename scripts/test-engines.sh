#!/usr/bin/env bash
# Runs tests/engines suite by suite, which takes more than an hour, and says in one line how each ended; its whole output is in
# build/test-engines. Arguments go to pytest. The exit code is 1 when a suite failed.
set -euo pipefail
cd "$(dirname "$0")/.."
logs=build/test-engines failed=0
mkdir -p "$logs"

for file in tests/engines/test_engines_*.py; do
    name=$(basename "$file" .py)
    name=${name#test_engines_} code=0
    .venv/bin/pytest -m engines "$file" "$@" >"$logs/$name.log" 2>&1 || code=$?
    [ "$code" != 5 ] || continue # none of its tests was asked for
    echo "engines: $name: $(tail -n 1 "$logs/$name.log" | tr -d '=' | sed 's/^ *//; s/ *$//')"
    [ "$code" = 0 ] || {
        failed=1
        grep -E '^(FAILED|ERROR) ' "$logs/$name.log" || tail -n 20 "$logs/$name.log"
    }
done
exit "$failed"
