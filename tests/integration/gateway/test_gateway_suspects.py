"""A request that ends every worker it runs on ends two, and what runs beside it goes on elsewhere, undisturbed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from services.common.base.errors import ErrorKind
from services.gateway.backends.rpc import link
from services.gateway.backends.workers import connections
from services.gateway.core.request import GenerationRequest, StopParams
from tests.support.servers.survival import Client, ObservedStream, Stage, asking, staged
from tests.support.waiting import until

STOP = StopParams(max_tokens=60, ignore_eos=True)
POISON = "poison"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "BACKOFF_S", (30.0, 30.0))  # a dead worker stays away
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)


class Morgue:
    """Lets each worker die that runs a request whose id begins with POISON, before it has sent a token of it."""

    def __init__(self, stage: Stage) -> None:
        self.dead: list[str] = []
        for number, (host, knife) in enumerate(zip(stage.hosts, stage.knives, strict=True)):
            self._poison(f"w{number}", host.worker.engine, knife)

    def _poison(self, name: str, engine: Any, knife: Any) -> None:
        submit = engine.submit

        def submitted(request: Any, context: Any, sink: Any) -> None:
            submit(request, context, sink)
            if request.request_id.startswith(POISON) and name not in self.dead:
                self.dead.append(name)
                knife.set(0)

        engine.submit = submitted


def innocent(number: int) -> GenerationRequest:
    return asking(f"innocent-{number}", f"Tell me of number {number}.", stop=STOP)


async def start(stage: Stage, request: GenerationRequest, choices: int = 1) -> list[asyncio.Task[ObservedStream]]:
    clients = [Client() for _ in range(choices)]
    await stage.pipeline.start(request, [cast(Any, client) for client in clients])

    async def heard(client: Client) -> ObservedStream:
        await asyncio.wait_for(client.over.wait(), 60)
        return client.heard

    return [asyncio.ensure_future(heard(client)) for client in clients]


async def test_request_that_ends_its_workers_before_its_first_token_ends_two_of_four(folder: Path) -> None:
    async with staged(folder, workers=4) as stage:
        morgue = Morgue(stage)
        heard = await stage.ask(asking(POISON, "Die.", stop=STOP))
        assert heard.error is not None
        assert heard.error.kind is ErrorKind.DISCONNECTED
        assert morgue.dead == ["w0", "w1"]
        assert (await stage.ask(innocent(1))).error is None
        await stage.quiet()


@pytest.mark.parametrize("with_tokens", [True, False])
async def test_streams_beside_a_request_that_ends_its_workers_finish_as_undisturbed(
    folder: Path, with_tokens: bool
) -> None:
    async with staged(folder, workers=4, speedup=5.0) as stage:
        calm = [(await stage.ask(innocent(number))).comparable for number in range(8)]
        morgue = Morgue(stage)
        asked = [task for number in range(8) for task in await start(stage, innocent(number))]
        if with_tokens:
            await until(lambda: all(len(s.tokens) > 3 for s in stage.pipeline.stream_manager._streams.values()))
        (poison,) = await start(stage, asking(POISON, "Die.", stop=STOP))
        assert (await poison).error is not None
        answers = await asyncio.gather(*asked)
        assert len(morgue.dead) == 2
        assert [answer.error for answer in answers] == [None] * 8
        assert [answer.text for answer in answers] == [told.text for told in calm]
        await stage.quiet()


async def test_choices_of_a_request_that_ends_its_workers_end_two_at_most(folder: Path) -> None:
    async with staged(folder, workers=4) as stage:
        morgue = Morgue(stage)
        request = asking(POISON, "Die.", stop=STOP)
        choices = await asyncio.gather(*await start(stage, request, choices=4))
        assert all(one.error is not None for one in choices)
        assert 1 <= len(morgue.dead) <= 2
        await stage.quiet()


async def test_drained_workers_do_not_count_as_deaths(folder: Path) -> None:
    async with staged(
        folder, workers=4, engine_args="timing=fixed,fixed_prefill_us=100000", speedup=1.0, drain_s=0.0
    ) as stage:
        (asked,) = await start(stage, asking("slow", "Tell me of it.", stop=StopParams(max_tokens=3, ignore_eos=True)))
        for host in stage.hosts[:3]:
            await until(lambda: host.worker.live_requests == 1)  # noqa: B023
            await host.worker.drain(0)
        answer = await asked
        assert answer.error is None
        assert answer.finish is not None
        assert answer.finish.migrations == 3
        await stage.quiet()
