"""Redis that wants a certificate of its callers, and what happens when everybody's are replaced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.router.store.base import StoreUnavailable
from services.router.store.redis import RedisStore
from services.router.store.redis_connect import connect
from services.router.store.redis_target import Credentials, parse
from services.router.store.redis_tls import RenewingConnection, RenewingSentinelConnection
from tests.support.authority import Authority
from tests.support.redis_server import RedisServer, free_port


class MutualRedis:
    """A server that takes only callers of an authority."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.new_authority()
        self._files = [
            *("tls-cert-file", str(folder / "server.pem"), "tls-key-file", str(folder / "server.key")),
            *("tls-ca-cert-file", str(folder / "ca.pem")),
        ]
        flags = [f"--{word}" if word.startswith("tls-") else word for word in self._files]
        self.server = RedisServer(folder, "--tls-port", str(self.port), "--tls-auth-clients", "yes", *flags)

    def new_authority(self) -> None:
        """Replaces every file."""
        authority = Authority(self.folder)
        authority.issue("server")
        authority.issue("router")

    async def reload(self) -> None:
        """Has the server read its files again, and cut whom it talks to."""
        async with Redis.from_url(self.server.url) as plain:
            await plain.execute_command("CONFIG", "SET", *self._files)
            await plain.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def store(self, **changes: Path | None) -> RedisStore:
        """What a router with these files has."""
        files: dict[str, Any] = {
            "ca_file": self.folder / "ca.pem",
            "cert_file": self.folder / "router.pem",
            "key_file": self.folder / "router.key",
            **changes,
        }
        return RedisStore(f"rediss://127.0.0.1:{self.port}/0", timeout_s=10, credentials=Credentials(**files))


@pytest.fixture
def mutual(tmp_path: Path) -> Iterator[MutualRedis]:
    running = MutualRedis(tmp_path)
    running.server.start()
    yield running
    running.server.stop()


async def answers(store: RedisStore) -> bool:
    try:
        await store.ping()
    except StoreUnavailable:
        return False
    return True


async def test_only_who_shows_a_certificate_is_answered(mutual: MutualRedis, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "theirs").issue("stranger")
    for changes, works in (
        ({}, True),
        ({"cert_file": None, "key_file": None}, False),
        ({"cert_file": stranger.tls_cert, "key_file": stranger.tls_key}, False),
    ):
        store = mutual.store(**changes)
        assert await answers(store) is works, changes
        await store.close()


async def test_a_store_goes_on_with_new_certificates(mutual: MutualRedis) -> None:
    store = mutual.store()
    assert await answers(store)
    for _ in range(2):
        mutual.new_authority()
        await mutual.reload()
        tries = [await answers(store) for _ in range(20)]
        assert tries[-1]  # the connections that were cut are found out one by one
    kept = (mutual.folder / "router.key").read_bytes()
    (mutual.folder / "router.key").write_text("half of a k")
    await mutual.reload()
    assert [await answers(store) for _ in range(20)][-1]
    (mutual.folder / "router.key").write_bytes(kept)
    await store.close()


async def test_every_topology_connects_anew_with_the_files_of_the_time(tmp_path: Path) -> None:
    login = Credentials(ca_file=tmp_path / "ca.pem")
    sentinel = connect(parse("rediss+sentinel://127.0.0.1:1,127.0.0.1:2/main/0", login), 1, 2)
    pool = sentinel.connection_pool
    assert pool.connection_class is RenewingSentinelConnection
    assert {guard.connection_pool.connection_class for guard in pool.sentinel_manager.sentinels} == {RenewingConnection}
    cluster = connect(parse("rediss+cluster://127.0.0.1:1,127.0.0.1:2", login), 1, 2)
    nodes = cluster.nodes_manager
    assert {node.connection_class for node in nodes.startup_nodes.values()} == {RenewingConnection}
    assert nodes.connection_kwargs["connection_class"] is RenewingConnection
