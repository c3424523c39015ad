# A Redis server. Where sentinels run, they know the master: a server that comes back must follow it, never be a second one.
# Before there are any, the server named redis leads and the others follow it.
leader=$(redis-cli -h sentinel -p 26379 sentinel get-master-addr-by-name sluice 2>/dev/null | head -n 1 | grep '\.')
: "${leader:=$(getent hosts redis | awk '{ print $1; exit }')}"
for own in $(hostname -i); do
    [ "$own" = "$leader" ] && leader=
done
# Only the network of this project reaches the server, so it asks for no password.
exec redis-server --protected-mode no --dir /data --appendonly yes --appendfsync everysec --save "" \
    ${leader:+--replicaof "$leader" 6379}
