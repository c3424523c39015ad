"""500 WebSockets of 20 turns beside event streams, while workers and postprocess replicas are killed: every answer is
that of an undisturbed connection, and the gateway's memory stays as it is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import psutil
import pytest
from websockets.asyncio.client import connect

from tests.support.clients.response_socket import LAST
from tests.support.data.tiny_models import build_tiny_model
from tests.support.servers.loose_suite import LooseSuite

pytestmark = pytest.mark.slow

CONNECTIONS, TURNS, KINDS, STREAMS = 500, 20, 5, 32
WARM_TURNS = 6  # turns of every connection before the gateway's memory is measured
GROWTH_MB = 64
WAIT_S = 600
LIMITS = {"max_output_tokens": 6, "store": False}


class Progress:
    """How far all connections are, and what the gateway's memory was."""

    def __init__(self) -> None:
        self.turns = 0
        self._of: list[int] = []
        self._changed = asyncio.Condition()

    def join(self) -> int:
        """The number of a new connection."""
        self._of.append(0)
        return len(self._of) - 1

    async def add(self, connection: int) -> None:
        async with self._changed:
            self.turns += 1
            self._of[connection] += 1
            self._changed.notify_all()

    async def all_go_on(self) -> None:
        """Waits until every connection has had another turn."""
        before = [*self._of]
        async with self._changed:
            await self._changed.wait_for(
                lambda: all(now > then or now == TURNS for now, then in zip(self._of, before, strict=True))
            )

    async def reaches(self, turns: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.turns >= turns)


async def chain(url: str, kind: int, progress: Progress) -> list[str]:
    """The texts of one connection's turns, each of which continues the one before."""
    texts, previous, connection = [], None, progress.join()
    address = url.replace("http", "ws", 1) + "/v1/responses"
    async with connect(address, compression=None, open_timeout=WAIT_S, ping_timeout=None) as socket:
        for turn in range(TURNS):
            body: dict[str, Any] = {"model": "tiny", "input": f"Turn {turn} of kind {kind}.", "seed": kind, **LIMITS}
            await socket.send(json.dumps({"type": "response.create", "previous_response_id": previous, **body}))
            event: dict[str, Any] = {"type": ""}
            while event["type"] not in LAST:
                event = json.loads(await asyncio.wait_for(socket.recv(), WAIT_S))
            assert event["type"] == "response.incomplete", event
            previous = event["response"]["id"]
            texts.append(event["response"]["output"][0]["content"][0]["text"])
            await progress.add(connection)
    return texts


async def streams(url: str, ended: asyncio.Event) -> set[str]:
    """The endings of event streams, one after the other, until `ended`."""
    endings = set()
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
        while not ended.is_set():
            body = {"model": "tiny", "input": "Beside.", "stream": True, "seed": 1, **LIMITS}
            text = (await client.post("/v1/responses", json=body)).text
            endings.add(text.rpartition("event: ")[2].partition("\n")[0])
    return endings


async def replace(suite: LooseSuite, name: str) -> None:
    """Kills a process and starts it again."""
    suite.end(name)
    suite.start(name)
    await asyncio.to_thread(suite.wait_ready, len(suite.workers))


async def test_many_connections_get_their_answers_while_processes_are_killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = build_tiny_model(tmp_path_factory.mktemp("sockets") / "tiny")
    flags = ("--engine-args", "timing=fixed,fixed_step_ms=5", "--drain-s", "1")
    with LooseSuite(model, workers=3, worker_flags=flags) as suite:
        expected = [await chain(suite.url, kind, Progress()) for kind in range(KINDS)]
        gateway = psutil.Process(suite.pid("gateway"))
        progress, ended = Progress(), asyncio.Event()
        beside = [asyncio.create_task(streams(suite.url, ended)) for _ in range(STREAMS)]
        chains = [asyncio.create_task(chain(suite.url, one % KINDS, progress)) for one in range(CONNECTIONS)]
        total = CONNECTIONS * TURNS
        await progress.reaches(total // 10)
        await replace(suite, "worker-0")
        await replace(suite, "postprocess-0")
        await progress.reaches(CONNECTIONS * WARM_TURNS)
        await progress.all_go_on()  # a request without output that loses two workers is not tried on a third
        before = gateway.memory_info().rss
        await replace(suite, "worker-1")
        await replace(suite, "postprocess-1")
        await progress.reaches(total * 9 // 10)
        after = gateway.memory_info().rss
        answers = await asyncio.gather(*chains)
        ended.set()
        endings = set().union(*await asyncio.gather(*beside))
    wrong = [index for index, texts in enumerate(answers) if texts != expected[index % KINDS]]
    assert not wrong, f"{len(wrong)} of {CONNECTIONS} connections got other answers"
    assert endings == {"response.incomplete"}
    print(f"gateway: {before >> 20} MiB, then {after >> 20} MiB")
    assert after - before < GROWTH_MB << 20
