# A sentinel. It queries the other sentinels for the master; the first ones use the server named redis.
password=$(cat /run/secrets/sluice_router_redis_password)
leader=$(REDISCLI_AUTH=$password redis-cli -h sentinel -p 26379 sentinel get-master-addr-by-name sluice 2>/dev/null \
    | head -n 1 | grep '\.')
: "${leader:=$(getent hosts redis | awk '{ print $1; exit }')}"
# A sentinel writes its state into its configuration.
umask 077
cat > /tmp/sentinel.conf <<CONF
port 26379
dir /tmp
requirepass $password
sentinel sentinel-pass $password
sentinel monitor sluice $leader 6379 2
sentinel auth-pass sluice $password
sentinel down-after-milliseconds sluice 2000
sentinel failover-timeout sluice 10000
sentinel parallel-syncs sluice 1
CONF
exec redis-server /tmp/sentinel.conf --sentinel
