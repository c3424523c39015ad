# Generates the password of Redis at the first start. Its volume is mounted by Redis and by the services that may call it.
set -eu
folder=${1:-/run/secrets}
[ -s "$folder/sluice_router_redis_password" ] && exit 0
umask 022
rm -f "$folder/password.new"
head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$folder/password.new"
# Named after the router's settings, and readable by every user: router and Redis run as different users.
chmod 0444 "$folder/password.new"
cp -pf "$folder/password.new" "$folder/sluice_router_redis_sentinel_password"
mv "$folder/password.new" "$folder/sluice_router_redis_password"
