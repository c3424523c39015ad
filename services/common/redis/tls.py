"""Connections to Redis that take the certificates as they are when they connect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.asyncio.connection import SSLConnection
from redis.asyncio.sentinel import SentinelManagedConnection


class RenewingConnection(SSLConnection):
    """redis-py reads the files once for each connection object, which lives on when it reconnects."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        known, self.ssl_context.context = self.ssl_context.context, None
        try:
            return dict(super()._connection_arguments())
        except OSError:
            if known is None:
                raise
            self.ssl_context.context = known  # somebody is replacing them: what was read before stays valid
            return dict(super()._connection_arguments())


class RenewingSentinelConnection(SentinelManagedConnection, RenewingConnection):
    """The same to the server that the sentinels name."""


def renew_in_cluster(cluster: Any) -> Any:
    """Has a cluster client use such connections, for nodes it knows and those it will hear of."""
    for settings in (cluster.connection_kwargs, cluster.nodes_manager.connection_kwargs):
        settings["connection_class"] = RenewingConnection
    for node in cluster.nodes_manager.startup_nodes.values():
        node.connection_class = RenewingConnection
    return cluster


def renew_in_sentinels(sentinel: Any) -> Any:
    """Has the connections to the sentinels themselves be such."""
    for guard in sentinel.sentinels:
        guard.connection_pool.connection_class = RenewingConnection
    return sentinel
