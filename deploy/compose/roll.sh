#!/bin/sh
# Replaces the containers of services one at a time while they serve: a new one is healthy before an old one stops.
#   deploy/compose/roll.sh [flags of docker compose --] SERVICE...
# Run it with the flags and variables with which the suite was started.
set -eu
here=$(dirname "$0")
flags=
case " $* " in
    *" -- "*) while [ "$1" != -- ]; do flags="$flags $1"; shift; done; shift ;;
esac
[ $# -gt 0 ] || { echo "usage: roll.sh [flags of docker compose --] SERVICE..." >&2; exit 2; }

# Callers resolve names every two seconds; then they have discovered the new replica.
known_after_s=5

compose() {
    # shellcheck disable=SC2086  # flags are words
    docker compose $flags -f "$here/compose.yaml" "$@"
}

for service; do
    old=$(compose ps --quiet "$service")
    [ -n "$old" ] || { echo "roll.sh: no container of $service runs" >&2; exit 1; }
    count=$(echo "$old" | wc -l)
    for container in $old; do
        compose up --detach --wait --no-deps --no-recreate --scale "$service=$((count + 1))" "$service"
        sleep "$known_after_s"
        docker stop "$container" >/dev/null
        docker rm "$container" >/dev/null
    done
done
