#!/bin/sh
# Pins every dependency with hashes in requirements/*.txt, from pyproject.toml. `scripts/lock.sh --upgrade` takes the
# newest versions, without it only what pyproject.toml no longer allows changes.
#
# No index, no local folder and no host may end up in these files, so the resolver sees neither the machine's settings
# nor writes where packages came from; whoever installs chooses the index.
set -eu
cd "$(dirname "$0")/.."
uv=$(command -v uv || echo .venv/bin/uv)
[ -x "$uv" ] || .venv/bin/python -m pip install --quiet uv

pin() {
    file=$1
    shift
    echo "requirements/$file"
    "$uv" pip compile pyproject.toml --quiet --no-config --universal --python-version 3.11 --generate-hashes \
        --no-header --no-annotate --no-emit-index-url --no-emit-find-links --output-file "requirements/$file" "$@"
}

pin dev.txt --extra all --group dev "$@"
# One version of everything: what the images and `make run` install is what the tests ran with.
same="--constraint requirements/dev.txt"
rm -f requirements/all.txt requirements/core.txt requirements/build.txt
pin all.txt --extra all --group build $same
pin core.txt $same
for service in gateway preprocess router postprocess worker; do
    rm -f "requirements/$service.txt"
    # What makes preprocess quick, and reads audio and videos, is optional for those who install the package, not for
    # its image.
    [ "$service" = preprocess ] && more="--extra fast --extra clips" || more=
    pin "$service.txt" --extra "$service" $more $same
done
rm -f requirements/engines.txt
pin engines.txt --extra worker --extra http --extra vllm-grpc --extra kubernetes --extra cli $same
# The image of the transformers engine, with the torch that the tests of engines run with.
rm -f requirements/engines/worker-transformers.txt
sed -n 's/^torch=/torch==/p' scripts/engines.sh |
    pin engines/worker-transformers.txt - --extra worker --extra transformers $same
echo requirements/build.txt
"$uv" pip compile --group pyproject.toml:build --quiet --no-config --universal --python-version 3.11 --generate-hashes \
    --no-header --no-annotate --no-emit-index-url --output-file requirements/build.txt $same
