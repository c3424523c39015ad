# redis-cli with the password, for health checks and for operators: docker compose exec redis sh /etc/sluice/cli.sh info
REDISCLI_AUTH=$(cat /run/secrets/sluice_router_redis_password) exec redis-cli "$@"
