"""Where a Redis is: the URLs that settings take."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from services.common.errors import SluiceError, invalid

FORMS = (
    "redis://host:port/db, redis+sentinel://host:port,host:port/service/db, redis+cluster://host:port,host:port or "
    "unix:///path; rediss instead of redis for TLS; user:password@ before the first host"
)
_PORT = 6379
_SENTINEL_PORT = 26379


class Topology(Enum):
    """How the servers belong together."""

    STANDALONE = ""
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a URL need not carry.

    `ca_file` is what servers' certificates are checked with, None for the system's; `cert_file` and `key_file` are
    shown to servers that ask for them. A password in the URL wins.
    """

    password: str = field(default="", repr=False)
    sentinel_password: str = field(default="", repr=False)
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A Redis: one server, the master behind sentinels, or a cluster.

    `nodes` are asked first; `path` is a socket instead. `tls` holds for servers and sentinels alike.
    """

    topology: Topology
    nodes: tuple[tuple[str, int], ...] = ()
    path: str = ""
    service: str = ""
    db: int = 0
    tls: bool = False
    username: str = ""
    credentials: Credentials = Credentials()


def parse(url: str, credentials: Credentials | None = None, setting: str = "redis-url") -> Target:
    """Reads a URL; SluiceError(INVALID_ARGUMENT) when it is none, which names the setting and repeats no password."""
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
            return Target(topology, path=parts.path, username=unquote(username), credentials=login)
        service, db = _path(parts.path, topology)
        nodes = _nodes(hosts, _SENTINEL_PORT if topology is Topology.SENTINEL else _PORT)
        if topology is Topology.STANDALONE and len(nodes) > 1:
            raise ValueError("several hosts need redis+sentinel or redis+cluster")
    except ValueError as error:
        raise _refused(error, setting) from error
    return Target(topology, nodes, "", service, db, scheme == "rediss", unquote(username), login)


def _login(given: Credentials, password: str, parts: SplitResult) -> Credentials:
    queries = parse_qs(parts.query, strict_parsing=bool(parts.query))
    sentinel = queries.pop("sentinel_password", [""])[0]
    if queries:
        raise ValueError(f"{', '.join(queries)} is unknown here")
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
            raise ValueError("the name of the service that the sentinels watch is missing")
        service = steps.pop(0)
    db = int(steps.pop(0)) if steps else 0
    if steps or db < 0:
        raise ValueError("its path says more than a database")
    if topology is Topology.CLUSTER and db:
        raise ValueError("a cluster has database 0 only")
    return service, db


def _nodes(hosts: str, port: int) -> tuple[tuple[str, int], ...]:
    nodes = []
    for each in hosts.split(","):
        parts = urlsplit(f"//{each}")
        nodes.append((parts.hostname or "127.0.0.1", parts.port or port))
    return tuple(nodes)


def _refused(error: ValueError, setting: str) -> SluiceError:
    return invalid(f"{setting} is no Redis URL: {error}. Give {FORMS}.", param=setting)
