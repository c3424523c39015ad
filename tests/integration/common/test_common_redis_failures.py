"""Every failure of Redis, injected into every user of it: a typed error at most, and nothing is executed twice."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MaxConnectionsError,
    MovedError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    SlotNotCoveredError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import TimeoutError as RedisTimeout

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.tasks import TaskOwner
from services.common.redis import masters, servers
from services.common.redis.connect import open_pool
from services.common.redis.failures import Failure, classify
from services.common.redis.scripts import MAX_RESENT
from services.common.redis.target import parse
from services.gateway.admission.keys import ApiKey
from services.gateway.admission.limits import LimitsUnavailable
from services.gateway.admission.redis_limiter import RedisLimiter
from services.gateway.apis.batches.redis_store import RedisBatchStore
from services.gateway.apis.batches.store import Limits
from services.gateway.apis.responses.redis_store import RedisStore as RedisResponses
from services.gateway.apis.responses.store import StoreLimits
from services.gateway.backends.workers.redis_fleet_store import RedisFleetStore
from services.router.state.store.base import StoreUnavailable
from services.router.state.store.redis import RedisStore
from tests.support.servers.scripted_redis import HANG_UP, SILENCE, ScriptedRedis, encoded
from tests.support.waiting import until

EMPTY = b"*0\r\n"
PATIENT_S = 10.0
"""Timeout of commands where none is expected."""


@pytest.fixture(autouse=True)
def patient_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a search outlast a pause of this process, in which the server runs too: one that fails is not repeated."""
    monkeypatch.setattr(masters, "MAX_PROBE_S", PATIENT_S)
    monkeypatch.setattr(servers, "SEARCH_S", PATIENT_S)


class User(NamedTuple):
    """A user of Redis: what a script of its is answered with, and a call of one script."""

    good: bytes
    open: Callable[[str, float], Any]
    use: Callable[[Any], Awaitable[object]]


USERS = {
    "router": User(EMPTY, lambda url, timeout_s: RedisStore(url, timeout_s=timeout_s), lambda store: store.models()),
    "limits": User(
        encoded(["", 0, 1, 0, 1, 0]),
        lambda url, timeout_s: RedisLimiter(url, timeout_s=timeout_s),
        lambda limiter: limiter.enter(ApiKey("k", "k", ""), "r"),
    ),
    "responses": User(
        b"$-1\r\n",
        lambda url, timeout_s: RedisResponses(url, StoreLimits.of(1, 1), 1, TaskOwner(), timeout_s=timeout_s),
        lambda store: store.find("t", "r"),
    ),
    "batches": User(
        EMPTY,
        lambda url, timeout_s: RedisBatchStore(url, Limits(1, 1, 1, 1), 1, timeout_s=timeout_s),
        lambda store: store.files("t"),
    ),
    "fleet": User(
        EMPTY, lambda url, timeout_s: RedisFleetStore(url, timeout_s=timeout_s), lambda store: store.all("adapters")
    ),
}

REPLIES: dict[str, tuple[bytes, Failure]] = {
    "hang-up": (HANG_UP, Failure.LOST),
    "silence": (SILENCE, Failure.TIMEOUT),
    "garbage": (b"?what\r\n", Failure.REFUSED),
    "READONLY": (b"-READONLY You can't write against a read only replica.\r\n", Failure.DEMOTED),
    "UNBLOCKED": (b"-UNBLOCKED force unblock from blocking operation, instance state changed\r\n", Failure.DEMOTED),
    "MOVED": (b"-MOVED 1 :%d\r\n", Failure.MOVED),
    "ASK": (b"-ASK 1 :%d\r\n", Failure.MIGRATING),
    "TRYAGAIN": (b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n", Failure.UNSETTLED),
    "CLUSTERDOWN": (b"-CLUSTERDOWN The cluster is down\r\n", Failure.DOWN),
    "MASTERDOWN": (
        b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.\r\n",
        Failure.DOWN,
    ),
    "NOREPLICAS": (b"-NOREPLICAS Not enough good replicas to write.\r\n", Failure.DOWN),
    "LOADING": (b"-LOADING Redis is loading the dataset in memory\r\n", Failure.LOADING),
    "NOSCRIPT": (b"-NOSCRIPT No matching script. Please use EVAL.\r\n", Failure.UNKNOWN_SCRIPT),
    "OOM": (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", Failure.REFUSED),
    "BUSY": (b"-BUSY Redis is busy running a script.\r\n", Failure.REFUSED),
    "max clients": (b"-ERR max number of clients reached\r\n", Failure.LOST),
    "NOAUTH": (b"-NOAUTH Authentication required.\r\n", Failure.LOST),
}
RESENT_BY_ROUTER = {"NOSCRIPT"}  # it compares its state with a new master before it goes on
RESENT_BY_GATEWAYS = {"NOSCRIPT", "READONLY", "UNBLOCKED", "MOVED", "ASK", "TRYAGAIN"}
RESENT_READS = {*RESENT_BY_GATEWAYS, "hang-up", "max clients", "NOAUTH"}
"""Of the stores of responses and batches, which read here."""
RESENT_BY = {"router": RESENT_BY_ROUTER, "responses": RESENT_READS, "batches": RESENT_READS}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("topology", ["single", "sentinel", "cluster"])
@pytest.mark.parametrize("kind", REPLIES)
async def test_failure_of_a_script_is_typed_and_over_with_the_next_call(kind: str, topology: str, user: str) -> None:
    good, make, use = USERS[user]
    async with ScriptedRedis(good) as server, asyncio.timeout(30):
        made = make(server.url(topology), 2.5 if kind == "silence" else PATIENT_S)
        expected = await use(made)
        before, searches = server.scripts, server.searches
        reply, failure = REPLIES[kind]
        server.plan = [reply % server.port if b"%d" in reply else reply]
        resent = kind in RESENT_BY.get(user, RESENT_BY_GATEWAYS)
        if resent:
            assert await use(made) == expected
        else:
            with pytest.raises((StoreUnavailable, LimitsUnavailable, SluiceError)) as failed:
                await use(made)
            if isinstance(failed.value, SluiceError):
                assert failed.value.kind is ErrorKind.UNAVAILABLE
        assert server.scripts - before == (2 if resent else 1), "what may have been executed is not sent again"
        assert await use(made) == expected
        if topology != "single" and failure.searches:
            await until(lambda: server.searches > searches)
        await made.close()


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("kind", ["READONLY", "MOVED", "ASK", "TRYAGAIN", "NOSCRIPT"])
async def test_failure_that_stays_is_not_sent_for_ever(kind: str, user: str) -> None:
    good, make, use = USERS[user]
    async with ScriptedRedis(good) as server, asyncio.timeout(30):
        made = make(server.url("cluster"), PATIENT_S)
        expected = await use(made)
        before = server.scripts
        reply, _ = REPLIES[kind]
        server.plan = [reply % server.port if b"%d" in reply else reply] * 1_000
        with pytest.raises((StoreUnavailable, LimitsUnavailable, SluiceError)):
            await use(made)
        assert server.scripts - before <= 2 + max(MAX_RESENT.values())
        server.plan = []
        assert await use(made) == expected
        await made.close()


async def test_concurrent_failures_start_few_searches() -> None:
    good, make, use = USERS["responses"]
    async with ScriptedRedis(good) as server, asyncio.timeout(30):
        made = make(server.url("cluster"), PATIENT_S)
        await use(made)
        before = server.searches
        server.plan = [REPLIES["CLUSTERDOWN"][0]] * 64
        outcomes = await asyncio.gather(*(use(made) for _ in range(64)), return_exceptions=True)
        assert all(isinstance(outcome, SluiceError) for outcome in outcomes)
        await asyncio.sleep(0.5)  # the search after the last failure
        assert 1 <= server.searches - before <= 4
        await made.close()


ERRORS: dict[BaseException, Failure] = {
    MovedError("1 a:1"): Failure.MOVED,
    AskError("1 a:1"): Failure.MIGRATING,
    TryAgainError(): Failure.UNSETTLED,
    ClusterDownError("down"): Failure.DOWN,
    MasterDownError("down"): Failure.DOWN,
    SlotNotCoveredError(): Failure.DOWN,
    BusyLoadingError(): Failure.LOADING,
    NoScriptError(): Failure.UNKNOWN_SCRIPT,
    ReadOnlyError(): Failure.DEMOTED,
    MaxConnectionsError(): Failure.POOL,
    ConnectionLost("No connection available."): Failure.POOL,
    ConnectionLost("Connection closed by server."): Failure.LOST,
    ConnectionRefusedError(): Failure.LOST,
    RedisTimeout(): Failure.TIMEOUT,
    TimeoutError(): Failure.TIMEOUT,
    OutOfMemoryError(): Failure.REFUSED,
    ResponseError("ERR Script attempted to access a non local key in a cluster node"): Failure.MIGRATING,
    ResponseError("NOREPLICAS Not enough good replicas to write."): Failure.DOWN,
    ResponseError("ERR unknown command"): Failure.REFUSED,
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}-{error}"[:40])
def test_error_has_one_meaning_for_all_users(error: BaseException) -> None:
    assert classify(error) is ERRORS[error]


def test_every_failure_is_injected_or_classified() -> None:
    assert {*ERRORS.values(), *(failure for _, failure in REPLIES.values())} == set(Failure)
    assert not set(itertools.chain(MAX_RESENT)) & {Failure.LOST, Failure.TIMEOUT}, "these may have been executed"


async def test_command_that_is_not_acknowledged_in_time_is_not_sent_again() -> None:
    async with ScriptedRedis(EMPTY) as server, asyncio.timeout(30):
        pool = open_pool(parse(server.url("single")), ("127.0.0.1", server.port), 2.5, connections=1)
        connection = await pool.get_connection()
        open_socket = connection._writer.get_extra_info("socket")
        assert open_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2500
        assert open_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        await pool.release(connection)
        await pool.disconnect()
