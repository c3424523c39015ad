"""Redis connections that reload TLS certificates whenever they connect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.asyncio.connection import SSLConnection
from redis.asyncio.sentinel import SentinelManagedConnection


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
