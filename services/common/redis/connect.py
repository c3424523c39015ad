"""Opens connections to single Redis servers, which reload TLS certificates whenever they connect."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from ssl import SSLContext
from typing import Any, TypeAlias

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.common.redis.target import Credentials, RedisTarget

Address: TypeAlias = tuple[str, int]
"""Host and port of a server; the path of a Unix socket and 0."""
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""When an idle connection is probed: after and every so many seconds, and lost after so many probes."""


def open_pool(target: RedisTarget, address: Address, timeout_s: float, connections: int) -> Any:
    """Returns a pool of connections to one data server; connects nothing yet.

    Calls have no timeout: callers set one deadline for each, which is cheaper than one for every read and write.

    Args:
        timeout_s: for connecting, and for waiting while all connections are in use; seconds.
        connections: maximum number.
    """
    login = {**_login(target), "db": target.db}
    return BlockingConnectionPool(
        max_connections=connections, timeout=timeout_s, **_options(target, address, timeout_s), **login
    )


def open_probe(target: RedisTarget, address: Address, timeout_s: float, sentinel: bool = False) -> Any:
    """Returns a client with one connection for questions about the topology, to a data server or a sentinel.

    It is to be closed after use, and is independent of every pool: a server that hangs delays nothing else.
    """
    login = {"password": target.credentials.sentinel_password or None} if sentinel else _login(target)
    options = _options(target, address, timeout_s) | {"socket_timeout": timeout_s}
    return Redis.from_pool(BlockingConnectionPool(max_connections=1, timeout=timeout_s, **options, **login))


def _login(target: RedisTarget) -> dict[str, Any]:
    return {"username": target.username or None, "password": target.credentials.password or None}


def _options(target: RedisTarget, address: Address, timeout_s: float) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_timeout": None,
        "socket_connect_timeout": timeout_s,
        "protocol": 2,  # the same response types from every server version
        # Callers have their own fallback; a retry here would only add latency.
        "retry": Retry(NoBackoff(), 0),
    }
    host, port = address
    if target.path:
        return {**options, "connection_class": UnixDomainSocketConnection, "path": target.path}
    secure = {"connection_class": RenewingConnection, **_tls(target.credentials)} if target.tls else {}
    server = {"host": host, "port": port, "socket_keepalive_options": _patience(timeout_s)}
    return {**options, "connection_class": Connection, **server, **secure}


def _patience(timeout_s: float) -> dict[int, int]:
    """Returns how long the system waits for a silent server, as far as it can be told, by number of the option.

    What a server does not acknowledge is not sent again after the timeout: a command that was given up would otherwise
    be executed half a minute later, when the network that lost it has healed, and claim a batch for nothing.
    """
    options = {**KEEPALIVE, "TCP_USER_TIMEOUT": max(1, int(timeout_s * 1000))}
    return {getattr(socket, name): value for name, value in options.items() if hasattr(socket, name)}


def _tls(credentials: Credentials) -> dict[str, Any]:
    files = {
        "ssl_ca_certs": credentials.ca_file,
        "ssl_certfile": credentials.cert_file,
        "ssl_keyfile": credentials.key_file,
    }
    return {"ssl_cert_reqs": "required", **{name: str(path) for name, path in files.items() if path}}


_last_read: dict[tuple[str | None, ...], SSLContext] = {}
"""What was read last from certificate files that could be read, by their names, of which a process has few."""


class RenewingConnection(SSLConnection):
    """A connection that rereads its certificate files on reconnects; redis-py reads them once per connection object."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        files = self.ssl_context
        names = (files.ca_certs, files.certfile, files.keyfile)
        files.context = None
        try:
            arguments = dict(super()._connection_arguments())
        except OSError:
            if names not in _last_read:
                raise
            files.context = _last_read[names]  # the files are being replaced: keep the previous ones
            return dict(super()._connection_arguments())
        if files.context is not None:
            _last_read[names] = files.context
        return arguments
