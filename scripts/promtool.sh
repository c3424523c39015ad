#!/usr/bin/env bash
# Makes promtool available to the tests of the alert rules: one on PATH, or else Debian's package unpacked under .venv/opt/prometheus.
set -eu
cd "$(dirname "$0")/.."
. scripts/apt.sh
home=$PWD/.venv/opt/prometheus

! command -v promtool >/dev/null || exit 0
! "$home/usr/bin/promtool" --version >/dev/null 2>&1 || exit 0

echo "promtool: fetching it for the tests"
rm -rf "$home"
mkdir -p "$home"
if ! unpack_packages "$home" prometheus >"$home/apt.log" 2>&1; then
    tail -n 5 "$home/apt.log" >&2
    echo "promtool: cannot fetch it with apt-get; put Prometheus' promtool on PATH and try again." >&2
    exit 1
fi
find "$home" -type f ! -name promtool ! -name apt.log -delete
"$home/usr/bin/promtool" --version
