"""What gateways share over Redis works on every kind of it: sentinels, a cluster, and TLS that wants certificates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.base.tasks import TaskOwner
from services.common.redis.target import Credentials
from services.gateway.admission.keys import ApiKey
from services.gateway.admission.limits import LimitsUnavailable
from services.gateway.admission.redis_limiter import RedisLimiter
from services.gateway.apis.responses.redis_store import RedisStore
from services.gateway.apis.responses.store import StoredResponse, StoreLimits
from tests.support.servers.mutual_redis import MutualRedis
from tests.support.servers.redis_topologies import RedisCluster, RedisSentinels

PATIENT_S = 20.0
AT_ONCE = 64
"""Many more than the connections that a gateway keeps."""

FieldReader = tuple[str, Credentials]


@pytest.fixture(scope="module", params=["sentinels", "cluster", "tls"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FieldReader]:
    folder = tmp_path_factory.mktemp(str(request.param))
    with ExitStack() as running:
        if request.param == "tls":
            mutual = MutualRedis(folder)
            running.callback(mutual.server.stop)
            mutual.server.start()
            yield mutual.url, mutual.credentials
        else:
            made = RedisSentinels(folder) if request.param == "sentinels" else RedisCluster(folder)
            running.callback(made.stop)
            made.start()
            yield made.url, Credentials()


async def test_limits_are_one_for_all_gateways(place: FieldReader) -> None:
    gateways = [RedisLimiter(place[0], "limits", PATIENT_S, place[1]) for _ in range(2)]
    keys = [ApiKey(f"{number:012}", "k", "", concurrency=AT_ONCE // 2) for number in range(3)]
    asked = [gateways[number % 2].enter(key, f"r{number}") for key in keys for number in range(AT_ONCE)]
    decisions = await asyncio.gather(*asked)
    refused = [decision for decision in decisions if decision.refused_by is not None]
    assert len(decisions) - len(refused) == len(keys) * AT_ONCE // 2
    for gateway in gateways:
        await gateway.close()


async def test_a_response_is_found_by_the_other_gateway(place: FieldReader) -> None:
    tasks = TaskOwner()
    here, there = (
        RedisStore(place[0], StoreLimits.of(AT_ONCE, 1 << 20), 60, tasks, "kept", PATIENT_S, credentials=place[1])
        for _ in range(2)
    )
    for number in range(AT_ONCE):
        here.put("me", f"resp_{number}", StoredResponse(b"%d" % number, b"[]"))
    for number in range(AT_ONCE):
        for _ in range(2000):
            found = await there.find("me", f"resp_{number}")
            if found is not None:
                break
            await asyncio.sleep(0.01)
        assert found == StoredResponse(b"%d" % number, b"[]")
    await tasks.close()
    await here.close()
    await there.close()


async def test_a_gateway_without_a_certificate_is_not_answered(tmp_path: Path) -> None:
    mutual = MutualRedis(tmp_path)
    mutual.server.start()
    try:
        limiter = RedisLimiter(
            mutual.url, "limits", PATIENT_S, replace(mutual.credentials, cert_file=None, key_file=None)
        )
        with pytest.raises(LimitsUnavailable):
            await limiter.enter(ApiKey("0" * 12, "k", ""), "r")
        await limiter.close()
    finally:
        mutual.server.stop()
