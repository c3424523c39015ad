#!/bin/sh
# Generates src/sluice_client/_wire from protos/. `generate.sh DIR` writes elsewhere.
set -eu
cd "$(dirname "$0")/../.."
root=$PWD
mkdir -p "${1:-clients/python/src/sluice_client/_wire}"
out=$(cd "${1:-clients/python/src/sluice_client/_wire}" && pwd)
# The plugin skips packages that exist in its working directory, and formats by the settings found there.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir contracts
cp -R "$root/protos/sluice" contracts/
# A field must not have the name of a method of betterproto2's messages. Only field numbers are on the wire.
sed -i.bak 's/WorkerLoad load = /WorkerLoad worker_load = /' contracts/sluice/v1/*.proto
if ! PATH="$root/.venv/bin:$PATH" python -m grpc_tools.protoc -I contracts --python_betterproto2_out=. \
    --python_betterproto2_opt=client_generation=none sluice/v1/common.proto sluice/v1/router.proto \
    sluice/v1/worker.proto 2>log; then
    cat log >&2
    exit 1
fi
rm -rf log py.typed contracts
rm -rf "$out"
cp -R "$work" "$out"
chmod 755 "$out"
