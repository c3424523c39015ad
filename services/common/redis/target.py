"""Parses the Redis URLs accepted by settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from pydantic import Field, FilePath, SecretStr
from pydantic_settings import BaseSettings

from services.common.base.errors import invalid

FORMS = (
    "redis://host:port/db, redis+sentinel://host:port,host:port/service/db, redis+cluster://host:port,host:port or "
    "unix:///path; rediss instead of redis for TLS; user:password@ before the first host"
)
_PORT = 6379
_SENTINEL_PORT = 26379


class Topology(Enum):
    """How the servers are organized."""

    STANDALONE = ""
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials that need not be in the URL; a password in the URL takes precedence.

    `ca_file` verifies servers' certificates, None for the system's CAs; `cert_file` and `key_file` are the client
    certificate.
    """

    password: str = field(default="", repr=False)
    sentinel_password: str = field(default="", repr=False)
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


class RedisLoginSettings(BaseSettings):
    """Redis credentials that need not be in the URL. Files are PEM, reread for every new connection."""

    redis_password: SecretStr = Field(SecretStr(""), description="password for Redis, if not in the URL")
    redis_sentinel_password: SecretStr = Field(
        SecretStr(""), description="password for the Redis sentinels, if not in the URL"
    )
    redis_ca_file: FilePath | None = Field(None, description="PEM file with the CA for Redis' certificate")
    redis_cert_file: FilePath | None = Field(None, description="PEM file with the client certificate for Redis")
    redis_key_file: FilePath | None = Field(None, description="PEM file with the key of redis-cert-file")

    @property
    def redis_credentials(self) -> Credentials:
        """The credentials, for `parse`."""
        return Credentials(
            self.redis_password.get_secret_value(),
            self.redis_sentinel_password.get_secret_value(),
            self.redis_ca_file,
            self.redis_cert_file,
            self.redis_key_file,
        )


@dataclass(frozen=True, slots=True)
class RedisTarget:
    """A Redis: one server, the master behind sentinels, or a cluster.

    `nodes` are the initial addresses; `path` is a Unix socket instead. `tls` applies to servers and sentinels alike.
    """

    topology: Topology
    nodes: tuple[tuple[str, int], ...] = ()
    path: str = ""
    service: str = ""
    db: int = 0
    tls: bool = False
    username: str = ""
    credentials: Credentials = Credentials()


def parse(url: str, credentials: Credentials | None = None, setting: str = "redis-url") -> RedisTarget:
    """Parses a URL; raises SluiceError(INVALID_ARGUMENT), which names the setting and reveals no password."""
    try:
        parts = urlsplit(url)
        scheme, _, kind = parts.scheme.replace("valkey", "redis", 1).partition("+")
        topology = Topology(kind)
        if scheme not in ("redis", "rediss", "unix") or (scheme == "unix" and kind):
            raise ValueError(f"its scheme is {parts.scheme!r}")
        users, _, hosts = parts.netloc.rpartition("@")
        username, _, password = users.partition(":")
        login = _login(credentials or Credentials(), unquote(password), parts)
        if scheme == "unix":
            return RedisTarget(topology, path=parts.path, username=unquote(username), credentials=login)
        service, db = _path(parts.path, topology)
        nodes = _nodes(hosts, _SENTINEL_PORT if topology is Topology.SENTINEL else _PORT)
        if topology is Topology.STANDALONE and len(nodes) > 1:
            raise ValueError("several hosts need redis+sentinel or redis+cluster")
    except ValueError as error:
        raise invalid(f"{setting} is not a Redis URL: {error}. Use {FORMS}.", param=setting) from error
    return RedisTarget(topology, nodes, "", service, db, scheme == "rediss", unquote(username), login)


def _login(given: Credentials, password: str, parts: SplitResult) -> Credentials:
    queries = parse_qs(parts.query, strict_parsing=bool(parts.query))
    sentinel = queries.pop("sentinel_password", [""])[0]
    if queries:
        raise ValueError(f"its parameter {', '.join(queries)} is unknown")
    return Credentials(
        password or given.password,
        sentinel or given.sentinel_password,
        given.ca_file,
        given.cert_file,
        given.key_file,
    )


def _path(path: str, topology: Topology) -> tuple[str, int]:
    steps = [unquote(step) for step in path.split("/") if step]
    service = ""
    if topology is Topology.SENTINEL:
        if not steps:
            raise ValueError("the service name monitored by the sentinels is missing")
        service = steps.pop(0)
    db = int(steps.pop(0)) if steps else 0
    if steps or db < 0:
        raise ValueError("its path has more than a database number")
    if topology is Topology.CLUSTER and db:
        raise ValueError("a cluster has database 0 only")
    return service, db


def _nodes(hosts: str, port: int) -> tuple[tuple[str, int], ...]:
    nodes = []
    for host in hosts.split(","):
        parts = urlsplit(f"//{host}")
        nodes.append((parts.hostname or "127.0.0.1", parts.port or port))
    return tuple(nodes)
