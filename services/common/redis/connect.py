"""Opens connections to a Redis of any topology, which reload TLS certificates whenever they connect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection
from redis.backoff import NoBackoff

from services.common.redis.target import Credentials, RedisTarget, Topology


def connect(target: RedisTarget, timeout_s: float, connections: int) -> Any:
    """Returns a client with redis.asyncio.Redis's methods; sends nothing yet.

    Calls have no timeout: callers set one deadline for each, which is cheaper than one for every read and write.

    Args:
        timeout_s: for connecting, seconds.
        connections: maximum number (in a cluster: per server); with one server, further callers wait for one.
    """
    options: dict[str, Any] = {
        "socket_timeout": None,
        "socket_connect_timeout": timeout_s,
        "protocol": 2,  # the same response types from every server version
        # Callers have their own fallback; a retry here would only add latency.
        "retry": Retry(NoBackoff(), 0),
    }
    login: dict[str, Any] = {"username": target.username or None, "password": target.credentials.password or None}
    secure: dict[str, Any] = {"ssl": True, **_tls(target.credentials)} if target.tls else {}
    if target.topology is Topology.CLUSTER:
        nodes = [ClusterNode(host, port) for host, port in target.nodes]
        cluster: Any = RedisCluster(
            startup_nodes=nodes, max_connections=connections, require_full_coverage=False, **options, **login, **secure
        )
        return renew_in_cluster(cluster) if target.tls else cluster
    if target.topology is Topology.SENTINEL:
        sentinel_login = {"password": target.credentials.sentinel_password or None}
        untyped: Any = Sentinel
        sentinel = untyped(
            target.nodes, sentinel_kwargs={**options, **sentinel_login, **secure}, **options, **login, **secure
        )
        if target.tls:
            renew_in_sentinels(sentinel)
            secure = {"connection_class": RenewingSentinelConnection}
        return sentinel.master_for(target.service, db=target.db, max_connections=connections, **secure)
    pool = BlockingConnectionPool(
        max_connections=connections, timeout=timeout_s, db=target.db, **options, **login, **_address(target)
    )
    return Redis.from_pool(pool)


async def hang_up(client: Any) -> None:
    """Closes idle connections, after the server became a replica and its name may resolve to another one.

    Cluster clients are redirected by the servers themselves.
    """
    if not isinstance(client, RedisCluster):
        await client.connection_pool.disconnect(inuse_connections=False)


def _address(target: RedisTarget) -> dict[str, Any]:
    if target.path:
        return {"connection_class": UnixDomainSocketConnection, "path": target.path}
    (host, port), *_ = target.nodes
    if target.tls:
        return {"connection_class": RenewingConnection, "host": host, "port": port, **_tls(target.credentials)}
    return {"connection_class": Connection, "host": host, "port": port}


def _tls(credentials: Credentials) -> dict[str, Any]:
    files = {
        "ssl_ca_certs": credentials.ca_file,
        "ssl_certfile": credentials.cert_file,
        "ssl_keyfile": credentials.key_file,
    }
    return {"ssl_cert_reqs": "required", **{name: str(path) for name, path in files.items() if path}}


class RenewingConnection(SSLConnection):
    """A connection that rereads its certificate files on reconnects; redis-py reads them once per connection object."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        previous, self.ssl_context.context = self.ssl_context.context, None
        try:
            return dict(super()._connection_arguments())
        except OSError:
            if previous is None:
                raise
            self.ssl_context.context = previous  # the files are being replaced: keep the previous ones
            return dict(super()._connection_arguments())


class RenewingSentinelConnection(SentinelManagedConnection, RenewingConnection):
    """The same for the server that the sentinels name."""


def renew_in_cluster(cluster: Any) -> Any:
    """Makes a cluster client use RenewingConnection for its current and future nodes."""
    for settings in (cluster.connection_kwargs, cluster.nodes_manager.connection_kwargs):
        settings["connection_class"] = RenewingConnection
    for node in cluster.nodes_manager.startup_nodes.values():
        node.connection_class = RenewingConnection
    return cluster


def renew_in_sentinels(sentinel: Any) -> Any:
    """Makes the connections to the sentinels themselves use RenewingConnection."""
    for client in sentinel.sentinels:
        client.connection_pool.connection_class = RenewingConnection
    return sentinel
