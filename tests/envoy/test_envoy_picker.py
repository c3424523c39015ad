"""The endpoint picker behind a real Envoy, of two versions: exact answers, subsets, sizes, outages and bookings."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from pathlib import Path

import httpx
import pytest
from google.protobuf import struct_pb2

from tests.support.servers.envoy import SUBSET_HEADER, SUBSET_LIST_HEADER
from tests.support.servers.envoy_front import VERSIONS, Answer, Front, chat, front
from tests.support.servers.http_upstream import Upstream
from tests.support.servers.redis_server import RedisServer
from tests.support.waiting import until

pytestmark = pytest.mark.envoy


def as_list(*endpoints: str) -> str:
    """Returns a list of endpoints as the value of the subset hint, for Envoy's header_to_metadata filter."""
    values = [struct_pb2.Value(string_value=each) for each in endpoints]
    value = struct_pb2.Value(list_value=struct_pb2.ListValue(values=values))
    return base64.b64encode(value.SerializeToString()).decode()


@pytest.mark.parametrize("version", VERSIONS)
async def test_thousand_chats_of_all_lengths_are_right_and_leave_nothing_booked(
    tmp_path: Path, redis: RedisServer, version: str
) -> None:
    rng = random.Random(1)
    async with front(tmp_path, redis, version=version) as found:
        gate = asyncio.Semaphore(32)

        async def one(number: int) -> Answer:
            length = int(100 * 2000 ** rng.random())  # 100 to 200,000 characters
            async with gate:
                return await found.ask(chat(f"{number} " + "x" * length))

        answers = await asyncio.gather(*(one(number) for number in range(1_000)))
        assert [each for each in answers if not each.right] == []
        assert {each.endpoint for each in answers} == set(found.endpoints)
        assert [each.served.elsewhere for each in found.upstreams] == [0, 0, 0]  # header and metadata agree
        await found.empty()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("original_dst", [False, True], ids=["override_host", "original_dst"])
async def test_bodies_at_the_limits_of_a_chunk_arrive_whole(
    tmp_path: Path, redis: RedisServer, version: str, original_dst: bool
) -> None:
    flags = ["--picker-fallbacks", "0"] if original_dst else []
    async with front(tmp_path, redis, flags, version=version, original_dst=original_dst) as found:
        for size in (61_999, 62_000, 62_001, 1_200_000):
            empty = len(chat(""))
            body = chat("x" * (size - empty))
            assert len(body) == size
            assert (await found.ask(body)).right
        await found.empty()


async def test_ten_megabytes_fifty_times_arrive_whole(tmp_path: Path, redis: RedisServer) -> None:
    async with front(tmp_path, redis) as found:
        body = chat("x" * 10_000_000)
        for _ in range(50):
            assert (await found.ask(body)).right
        assert (await found.ask(chat("x" * (17 << 20)))).status == 413
        await found.empty()


async def test_subsets_as_string_list_mixed_and_empty_are_obeyed(tmp_path: Path, redis: RedisServer) -> None:
    async with front(tmp_path, redis) as found:
        one, two, three = found.endpoints
        cases = [
            ({SUBSET_HEADER: f"{one},{two}"}, {one, two}),
            ({SUBSET_HEADER: three}, {three}),
            ({SUBSET_LIST_HEADER: as_list(two)}, {two}),
            ({SUBSET_LIST_HEADER: as_list(f"{one}, {two}", three)}, {one, two, three}),
        ]
        for headers, allowed in cases:
            answers = await asyncio.gather(*(found.ask(chat(f"{n}"), **headers) for n in range(20)))
            assert all(each.right for each in answers)
            assert {each.endpoint for each in answers} <= allowed
        for headers in ({SUBSET_HEADER: ","}, {SUBSET_LIST_HEADER: as_list()}, {SUBSET_HEADER: "10.0.0.1:1"}):
            rejected = await found.ask(chat("x"), **headers)
            assert rejected.status == 503
            assert json.loads(rejected.text)["error"]["message"]
        await found.empty()


async def test_requests_without_a_body_reach_an_endpoint(tmp_path: Path, redis: RedisServer) -> None:
    async with front(tmp_path, redis) as found:
        answer = await found.client.get("/v1/models")
        assert answer.status_code == 200
        assert "digest" in answer.text


async def test_clients_that_leave_release_their_bookings(tmp_path: Path, redis: RedisServer) -> None:
    """They leave while their request waits, and in the middle of its answer."""
    slow = Upstream(hold_s=0.2, chunks=50, chunk_s=0.1)
    async with front(tmp_path, redis, ["--busy-requests", "2", "--wait-ms", "60000"], upstream=slow) as found:

        async def leave(after_s: float) -> None:
            try:
                async with asyncio.timeout(after_s):
                    await found.ask(chat("x"))
            except (TimeoutError, httpx.HTTPError):
                return

        await asyncio.gather(*(leave(0.1 + number / 10) for number in range(20)))
        await found.empty()


@pytest.mark.parametrize("fail_open", [True, False], ids=["fail_open", "fail_closed"])
@pytest.mark.parametrize("version", VERSIONS)
async def test_killed_picker_fails_open_or_closed_and_comes_back(
    tmp_path: Path, redis: RedisServer, version: str, fail_open: bool
) -> None:
    flags = ["--owner-lease-ms", "1000"]
    async with front(tmp_path, redis, flags, fail_open=fail_open, version=version) as found:
        answers: list[tuple[str, Answer]] = []
        phase = "before"

        async def load() -> None:
            while phase != "over":
                began = phase
                try:
                    answer = await found.ask(chat(str(random.random())))
                except httpx.HTTPError:
                    continue  # its connection ended with the picker
                answers.append((began, answer))

        async def answered(name: str) -> bool:
            return sum(began == name for began, _ in answers) > 20

        loading = [asyncio.create_task(load()) for _ in range(8)]
        await until(lambda: answered("before"))
        phase = "away"
        await found.pickers[0].kill()
        await asyncio.sleep(2)
        await until(lambda: answered("away"))
        phase = "starting"
        await found.pickers[0].start()
        await until(lambda: _recovered(found))
        phase = "after"
        await until(lambda: answered("after"))
        phase = "over"
        await asyncio.gather(*loading)
        by_phase = {name: [each for began, each in answers if began == name] for name in ("before", "away", "after")}
        assert all(each.right for each in by_phase["after"])
        if fail_open:
            wrong = [each for _, each in answers if each.status == 200 and not each.right]
            assert wrong == []
            assert any(each.right for each in by_phase["away"])
        else:
            assert not any(each.right for each in by_phase["away"][10:])
        await found.empty()


async def _recovered(found: Front) -> bool:
    try:
        return all([(await found.ask(chat(str(n)))).right for n in range(3)])
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("pickers", [2, 4])
async def test_pickers_on_one_redis_never_overbook(tmp_path: Path, redis: RedisServer, pickers: int) -> None:
    """One of them is killed in the middle; each endpoint counts how many requests it had at a time."""
    most = 4
    flags = ["--busy-requests", str(most), "--owner-lease-ms", "1500"]
    held = Upstream(hold_s=0.05)
    async with front(tmp_path, redis, flags, pickers=pickers, upstream=held) as found:
        statuses: dict[int, int] = {}
        over = False

        async def load() -> None:
            while not over:
                try:
                    answer = await found.ask(chat(str(random.random())))
                except httpx.HTTPError:
                    continue
                statuses[answer.status] = statuses.get(answer.status, 0) + 1

        async def loaded() -> bool:
            return statuses.get(200, 0) > 100 and statuses.get(429, 0) > 100

        loading = [asyncio.create_task(load()) for _ in range(40)]
        await until(loaded, timeout_s=60)
        await found.pickers[0].kill()
        statuses.clear()
        await asyncio.sleep(2)  # its lease ends
        await until(loaded, timeout_s=60)
        over = True
        await asyncio.gather(*loading)
        assert [each.served.most for each in found.upstreams] == [most] * 3  # full, and never more
        await found.empty()
