"""Redis that wants a certificate of its callers, and what happens when everybody's are replaced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.redis.connect import RenewingConnection, open_pool, open_probe
from services.common.redis.target import Credentials, parse
from services.router.state.store.base import StoreUnavailable
from services.router.state.store.redis import RedisStore
from tests.support.data.authority import Authority
from tests.support.servers.mutual_redis import MutualRedis
from tests.support.servers.redis_topologies import RedisSentinels


@pytest.fixture
def mutual(tmp_path: Path) -> Iterator[MutualRedis]:
    running = MutualRedis(tmp_path)
    running.server.start()
    yield running
    running.server.stop()


def store(mutual: MutualRedis, **changes: Path | None) -> RedisStore:
    """What a router with these files has."""
    files: dict[str, Any] = changes
    return RedisStore(mutual.url, timeout_s=10, credentials=replace(mutual.credentials, **files))


async def answers(store: RedisStore) -> bool:
    try:
        await store.ping()
    except StoreUnavailable:
        return False
    return True


async def test_only_who_shows_a_certificate_is_answered(mutual: MutualRedis, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "theirs").issue("stranger")
    late = mutual.authority.issue("late", expired=True)
    for changes, works in (
        ({}, True),
        ({"cert_file": None, "key_file": None}, False),
        ({"cert_file": late.tls_cert, "key_file": late.tls_key}, False),
        ({"cert_file": stranger.tls_cert, "key_file": stranger.tls_key}, False),
        ({"ca_file": stranger.tls_ca}, False),
    ):
        caller = store(mutual, **changes)
        assert await answers(caller) is works, changes
        await caller.close()


async def test_a_store_goes_on_with_new_certificates(mutual: MutualRedis) -> None:
    router = store(mutual)
    assert await answers(router)
    for _ in range(2):
        mutual.new_authority()
        await mutual.reload()
        tries = [await answers(router) for _ in range(20)]
        assert tries[-1]  # the connections that were cut are found out one by one
    kept = (mutual.folder / "caller.key").read_bytes()
    (mutual.folder / "caller.key").write_text("half of a k")
    await mutual.reload()
    assert [await answers(router) for _ in range(20)][-1]
    (mutual.folder / "caller.key").write_bytes(kept)
    await router.close()


async def test_sentinels_and_the_master_they_name_want_certificates_too(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "files")
    ours = authority.issue("caller")
    (tmp_path / "servers").mkdir()
    sentinels = RedisSentinels(tmp_path / "servers", authority.issue("server"))
    credentials = Credentials(ca_file=ours.tls_ca, cert_file=ours.tls_cert, key_file=ours.tls_key)
    try:
        sentinels.start()
        for shown, works in ((credentials, True), (Credentials(ca_file=ours.tls_ca), False)):
            caller = RedisStore(sentinels.url, timeout_s=10, credentials=shown)
            assert await answers(caller) is works, shown
            await caller.close()
    finally:
        sentinels.stop()


@pytest.mark.parametrize("kind", ["", "+sentinel", "+cluster"])
async def test_every_topology_connects_anew_with_the_files_of_the_time(tmp_path: Path, kind: str) -> None:
    url = f"rediss{kind}://127.0.0.1:1/" + ("main/0" if kind == "+sentinel" else "")
    target = parse(url, Credentials(ca_file=tmp_path / "ca.pem"))
    here = ("127.0.0.1", 1)
    pools = [open_pool(target, here, 1, 2)]
    pools += [open_probe(target, here, 1, sentinel).connection_pool for sentinel in (False, True)]
    assert {pool.connection_class for pool in pools} == {RenewingConnection}
