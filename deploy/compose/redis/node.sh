# A Redis server. If sentinels run, it follows the master they name: a returning server must never become a second master.
# Without sentinels, the server named redis is the master and the others follow it.
password=$(cat /run/secrets/sluice_router_redis_password)
leader=$(REDISCLI_AUTH=$password redis-cli -h sentinel -p 26379 sentinel get-master-addr-by-name sluice 2>/dev/null \
    | head -n 1 | grep '\.')
: "${leader:=$(getent hosts redis | awk '{ print $1; exit }')}"
for own in $(hostname -i); do
    [ "$own" = "$leader" ] && leader=
done
# In a file, because flags are visible in the process list.
umask 077
cat > /tmp/redis.conf <<CONF
requirepass $password
masterauth $password
dir /data
appendonly yes
appendfsync everysec
save ""
${leader:+replicaof $leader 6379}
CONF
exec redis-server /tmp/redis.conf
