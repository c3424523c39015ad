#!/bin/sh
# Generates sluice/v1 (messages, services and their type stubs) from protos/. `scripts/protos.sh DIR` writes elsewhere.
set -eu
cd "$(dirname "$0")/.."
out=${1:-.}
mkdir -p "$out"
PATH="$PWD/.venv/bin:$PATH" python -m grpc_tools.protoc -I protos --python_out="$out" --grpc_python_out="$out" \
    --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" protos/sluice/v1/*.proto
touch "$out/sluice/v1/__init__.py"
