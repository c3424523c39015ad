"""The Redis store on every kind of Redis: a cluster, sentinels that fail over, TLS and passwords."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from services.common.base.packing import pack_u64, unpack_u64
from services.common.net.ports import free_port
from services.common.redis.target import Credentials
from services.router.state.kv_index.events import BlockOp, BlocksChanged, CacheOperation, EventBatch, Tier
from services.router.state.reservations.cost import Load, Offer
from services.router.state.reservations.table import ReservationParams
from services.router.state.store.base import Lease, StoreUnavailable
from services.router.state.store.redis import RedisStore
from services.router.state.workers.worker import Role, Worker, WorkerRank
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.redis_topologies import RedisCluster, RedisSentinels, ask
from tests.support.waiting import until

A = WorkerRank("a", 0)
OFFERS = [Offer(A, 10, 10, 0, 10_000, 10_000)]


def worker(model: str) -> Worker:
    return Worker("a", "a:1", 1, model, Role.AGGREGATED, 16, "sluice-xxh3-v1", 100, 1, b"")


def stored(sequence: int, *hashes: int) -> EventBatch:
    return EventBatch(0, sequence, (BlockOp(CacheOperation.STORED, Tier.DEVICE, pack_u64(hashes)),))


async def held(store: RedisStore, model: str) -> list[int]:
    found = await store.blocks(model, A)
    assert found is not None
    return sorted(unpack_u64(found[1].tiers[Tier.DEVICE]))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    made = RedisCluster(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[RedisSentinels]:
    made = RedisSentinels(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()


async def test_models_spread_over_the_nodes_of_a_cluster(cluster: RedisCluster) -> None:
    store = RedisStore(cluster.url, timeout_s=10)
    models = [f"model-{number}" for number in range(12)]
    for model in models:
        await store.register(worker(model), "s", 60_000)
        await store.apply(model, "a", 1, 100, [stored(1, 7, 8)])
        await store.select(model, OFFERS, ReservationParams("r", 60_000))
    assert sorted(await store.models()) == sorted(models)
    assert min(cluster.keys()) > 0
    for model in models:
        assert await held(store, model) == [7, 8]
        assert await store.free(model, ["r"]) == []
        assert (await store.pulse(model)).loads == {}
    await store.close()


async def test_a_node_of_a_cluster_that_forgot_its_scripts_learns_them_again(cluster: RedisCluster) -> None:
    store = RedisStore(cluster.url, timeout_s=10)
    await store.register(worker("m"), "s", 60_000)
    for node in cluster.nodes:
        ask(node.port, "SCRIPT", "FLUSH")
    assert await store.renew("m", "a", "s", 60_000, None) is Lease.HELD
    await store.close()


async def test_the_store_moves_to_the_new_master_when_the_old_one_dies(sentinels: RedisSentinels) -> None:
    store = RedisStore(sentinels.url, timeout_s=10)
    await store.register(worker("m"), "s", 60_000)
    await store.apply("m", "a", 1, 100, [stored(1, 7, 8)])
    await store.select("m", OFFERS, ReservationParams("r", 60_000))
    position = (await store.load("m")).position
    sentinels.replicated()
    sentinels.master.stop()
    with pytest.raises(StoreUnavailable):
        await store.select("m", OFFERS, ReservationParams("r2", 60_000))

    async def back() -> bool:
        try:
            await store.ping()
            return await store.renew("m", "a", "s", 60_000, None) is Lease.HELD
        except StoreUnavailable:
            return False

    await until(back, timeout_s=60)
    assert await held(store, "m") == [7, 8]
    assert (await store.pulse("m")).loads == {A: Load(10, 10, 1)}
    await store.apply("m", "a", 1, 100, [stored(2, 9)])
    async for changes in store.follow("m", position):
        if changes:
            assert [change.batch if isinstance(change, BlocksChanged) else change for change in changes] == [
                stored(2, 9)
            ]
            break
    await store.close()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Host and port of a server that speaks TLS and asks for a password, and the file to check it with."""
    folder = tmp_path_factory.mktemp("redis-tls")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    ca, cert, key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
    authority.cert_pem.write_to_path(str(ca))
    certificate.cert_chain_pems[0].write_to_path(str(cert))
    certificate.private_key_pem.write_to_path(str(key))
    port = free_port()
    files = ("--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-ca-cert-file", str(ca))
    server = RedisServer(
        folder, "--tls-port", str(port), "--tls-auth-clients", "no", *files, "--requirepass", "se@cret"
    )
    server.start()
    yield f"127.0.0.1:{port}", ca
    server.stop()


@pytest.mark.parametrize(
    ("login", "password"), [(":se%40cret@", ""), ("default:se%40cret@", "ignored"), ("", "se@cret")]
)
async def test_tls_and_a_password(secured: tuple[str, Path], login: str, password: str) -> None:
    address, ca = secured
    store = RedisStore(f"rediss://{login}{address}/3", timeout_s=10, credentials=Credentials(password, ca_file=ca))
    await store.register(worker("m"), "s", 60_000)
    assert await store.models() == ["m"]
    await store.close()


@pytest.mark.parametrize(
    ("scheme", "password", "trusted"),
    [("rediss", "", True), ("rediss", "no", True), ("rediss", "se@cret", False), ("redis", "se@cret", True)],
)
async def test_what_is_not_allowed_in_is_a_store_that_is_away(
    secured: tuple[str, Path], scheme: str, password: str, trusted: bool
) -> None:
    address, ca = secured
    credentials = Credentials(password, ca_file=ca if trusted else None)
    store = RedisStore(f"{scheme}://{address}", timeout_s=5, credentials=credentials)
    with pytest.raises(StoreUnavailable) as away:
        await store.ping()
    assert "se@cret" not in away.value.message
    await store.close()
