#!/usr/bin/env bash
# Makes .venv-engines/vllm and .venv-engines/sglang, where the engines' own tokenizers run without a GPU: about 5 GB; and
# .venv-engines/transformers (1 GB), where a worker serves a real model.
# Does nothing when nothing changed since the last time. PYTHON names the interpreter, which must be a 3.11.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
torch=2.13.0

say() { echo "engines: $*"; }

install() {
    local engine=$1 list=requirements/engines/$1.txt folder=.venv-engines/$1 state
    state="$PWD $torch $(cksum <"$list")"
    [ "$(cat "$folder/.setup" 2>/dev/null)" != "$state" ] || return 0
    say "installing $list"
    "${PYTHON:-python3.11}" -m venv --clear "$folder"
    # Pinned and without dependencies: these would bring CUDA, which no tokenizer needs.
    "$folder/bin/python" -m pip install --quiet --no-deps -r "$list"
    # The build for CPUs is 200 MB; where it is not offered, the one for GPUs does as well.
    "$folder/bin/python" -m pip install --quiet --no-deps "torch==$torch+cpu" 2>/dev/null ||
        "$folder/bin/python" -m pip install --quiet "torch==$torch"
    echo "$state" >"$folder/.setup"
}

[ $# -gt 0 ] || set -- vllm sglang transformers
for engine in "$@"; do install "$engine"; done
