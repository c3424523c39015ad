#!/usr/bin/env bash
# Puts the package bfcl-eval into build/bfcl, without its dependencies, for `make test-bfcl`, which reads its data.
set -euo pipefail
cd "$(dirname "$0")/.."
version=2026.3.23
[ -d "build/bfcl/bfcl_eval-$version.dist-info" ] && exit 0
rm -rf build/bfcl
.venv/bin/python -m pip install --quiet --no-deps --no-compile --target build/bfcl "bfcl-eval==$version"
