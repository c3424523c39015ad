#!/usr/bin/env bash
# Makes a redis-server available to the tests: one on PATH, or else Debian's package unpacked under .venv/opt/redis.
# Nothing is installed on the machine and no daemon starts, root or not.
set -eu
cd "$(dirname "$0")/.."
. scripts/apt.sh
home=$PWD/.venv/opt/redis

! command -v redis-server >/dev/null || exit 0
! "$home/bin/redis-server" --version >/dev/null 2>&1 || exit 0

echo "redis: fetching redis-server for the tests"
rm -rf "$home"
mkdir -p "$home/bin"
if ! unpack_packages "$home" redis-server >"$home/apt.log" 2>&1; then
    tail -n 5 "$home/apt.log" >&2
    echo "redis: cannot fetch it with apt-get; put a redis-server 7 on PATH and try again." >&2
    exit 1
fi
libraries=$(find "$home" -name '*.so.*' -printf '%h\n' | sort -u | paste -s -d :)
for program in redis-server redis-cli; do
    cat >"$home/bin/$program" <<END
#!/bin/sh
LD_LIBRARY_PATH=$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH} exec "$home/usr/bin/$program" "\$@"
END
    chmod +x "$home/bin/$program"
done
"$home/bin/redis-server" --version
