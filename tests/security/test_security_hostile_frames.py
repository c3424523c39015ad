"""A hostile worker sends random frames beside honest streams: every honest answer is its undisturbed one."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import grpc
import httpx
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from services.common.base.packing import pack_u32
from sluice.v1 import common_pb2, postprocess_pb2, worker_pb2
from tests.support.clients.honest_clients import HonestClients
from tests.support.fakes.hostile_worker import HostileWorker
from tests.support.servers.suite import Suite
from tests.support.waiting import until

FRAMES, SLOW_FRAMES = 2_000, 100_000
FRAMES_A_STEP = 1_000
STREAMS = 20
VICTIMS = 4
GUESSES = 600
FLOATS = (0.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e300)
TEXTS = ("", "x", "evil\n", "\x00", "a" * 5_000, "\u2028", "é" * 10)

T = TypeVar("T")


class Frames:
    """Random frames, the same for a seed."""

    def __init__(self, seed: int, own: list[int]) -> None:
        self._random = random.Random(seed)
        self._own = own

    def next(self) -> worker_pb2.TokenBatch:
        """One frame that the gateway can parse, whatever it says."""
        frame = worker_pb2.TokenBatch(extras=[self._extra() for _ in range(self._random.randrange(3))])
        counts = [self._random.choice((0, 1, 1, 1, 2, 7)) for _ in range(self._random.randrange(6))]
        frame.slots = pack_u32([self._slot() for _ in counts])
        frame.counts = pack_u32(counts)
        frame.token_ids = pack_u32([self._number() for _ in range(sum(counts))])
        return frame

    def garbage(self) -> worker_pb2.TokenBatch | bytes:
        """A frame that cannot be parsed, or whose columns do not fit together."""
        if self._random.random() < 0.5:
            return b"\xff" + self._random.randbytes(self._random.randrange(1, 60))
        return worker_pb2.TokenBatch(slots=pack_u32([1, 2]), counts=pack_u32([1]), token_ids=b"\1\0\0")

    def _slot(self) -> int:
        if self._own and self._random.random() < 0.5:
            return self._random.choice(self._own)
        return self._random.choice((self._random.randrange(GUESSES), self._number()))

    def _number(self) -> int:
        return self._random.choice((0, 1, 2, self._random.randrange(130_000), 2**31, 2**32 - 1))

    def _text(self) -> str:
        return self._random.choice(TEXTS)

    def _extra(self) -> worker_pb2.TokenExtra:
        roll = self._random.random
        extra = worker_pb2.TokenExtra(slot=self._slot())
        if roll() < 0.3:
            extra.finish_reason = self._random.choice((1, 2, 3, 4, 5, 6, 7, 99))  # type: ignore[assignment]
            extra.usage.CopyFrom(common_pb2.Usage(completion_tokens=self._number(), prompt_tokens=self._number()))
        if roll() < 0.2:
            kind = self._random.choice((0, 1, 4, 5, 9, 10, 11, 20, 25, 77))
            extra.error.CopyFrom(common_pb2.ErrorDetail(kind=kind, message=self._text(), code=self._text()))  # type: ignore[arg-type]
        if roll() < 0.2:
            extra.cached_tokens = self._number()
        if roll() < 0.2:
            extra.stop_token_id = self._number()
        if roll() < 0.2:
            extra.handoff = self._random.randbytes(self._random.randrange(40))
        if roll() < 0.1:
            extra.prompt_token_ids = self._random.randbytes(self._random.randrange(40))
        if roll() < 0.2:
            extra.logprobs.extend(self._positions())
        if roll() < 0.1:
            extra.prompt_logprobs.extend(self._positions())
        if roll() < 0.2:
            extra.events.extend(self._event() for _ in range(self._random.randrange(3)))
        return extra

    def _positions(self) -> Iterator[common_pb2.PositionLogprobs]:
        for _ in range(self._random.randrange(4)):
            tokens = [
                common_pb2.TokenLogprob(token_id=self._number(), logprob=self._random.choice(FLOATS)) for _ in range(3)
            ]
            yield common_pb2.PositionLogprobs(chosen=tokens[0], top=tokens)

    def _event(self) -> postprocess_pb2.StreamEvent:
        event = postprocess_pb2.StreamEvent(
            slot=self._slot(),
            text=self._text(),
            reasoning=self._text(),
            degraded=self._text(),
            tokens_seen=self._number(),
        )
        event.tool_calls.add(index=self._number(), id=self._text(), name=self._text(), arguments=self._text())
        event.tokens.lengths = self._random.randbytes(self._random.randrange(9))
        event.tokens.pieces = self._random.randbytes(self._random.randrange(9))
        event.finish_reason = self._random.choice((0, 0, 1, 5, 99))  # type: ignore[assignment]
        return event


class Arena:
    """A suite, honest clients, and the hostile worker with requests of its own, on an event loop in a thread."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.honest = HonestClients(suite.url, STREAMS, tokens=100, worker="worker-0")
        self.worker = HostileWorker(model="tekken")
        self.answers: set[int] = set()
        self._failure: BaseException | None = None
        self._victims: list[asyncio.Task[None]] = []

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Runs a job on the loop.

        Once a job has failed every other one fails with its error: hypothesis runs a failing example again, and what
        the second run does would hide the reason.
        """
        if self._failure is not None:
            job.close()
            raise self._failure
        try:
            return asyncio.run_coroutine_threadsafe(job, self._loop).result(300)
        except BaseException as error:
            self._failure = error
            raise

    async def open(self) -> None:
        """Everything runs when this returns."""
        await self.honest.__aenter__()
        await self.worker.__aenter__()
        self._attached = await self.worker.attach(self._suite.address("router"))
        await self.worker.connected()
        self._lease = asyncio.create_task(self._keep_lease())
        self._victims = [asyncio.create_task(self._keep_asking()) for _ in range(VICTIMS)]

    async def close(self) -> None:
        """Ends the victims first, so that none waits for a worker that is gone."""
        for victim in self._victims:
            victim.cancel()
        self._lease.cancel()
        await asyncio.gather(*self._victims, self._lease, return_exceptions=True)
        await self._attached.close()
        await self.honest.__aexit__(None, None, None)
        await self.worker.__aexit__(None, None, None)

    def stop(self) -> None:
        """Ends the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _keep_lease(self) -> None:
        """Attaches again after a lost connection or late heartbeats, as workers do: this process may be paused."""
        late = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        while await self._attached.call.code() in late:
            await self._attached.close()
            self._attached = await self.worker.attach(self._suite.address("router"))

    async def _keep_asking(self) -> None:
        """Requests that run on the hostile worker; each is answered with a 200 or a typed error."""
        headers = {"x-sluice-worker": "hostile", "x-request-timeout-ms": "2000"}
        body = {"model": "tekken", "prompt": [1, 2, 3], "max_tokens": 20, "logprobs": 1}
        async with httpx.AsyncClient(base_url=self._suite.url, timeout=60, headers=headers) as http:
            while True:
                answer = await http.post("/v1/completions", json=body)
                self.answers.add(answer.status_code)
                assert answer.status_code == 200 or answer.json()["error"]["message"]

    async def attack(self, seed: int) -> None:
        """Sends a step's worth of frames."""
        await self.worker.connected()
        frames = Frames(seed, self._newest())
        before = self.worker.sent
        while self.worker.sent - before < FRAMES_A_STEP:
            await self.worker.connected()
            self.worker.send(*(frames.next() for _ in range(100)))
            await self.worker.drained()

    async def fail_a_victim(self) -> None:
        """Ends the newest requests with an internal error until one is answered, which random frames may never do."""
        error = common_pb2.ErrorDetail(kind=common_pb2.ERROR_KIND_INTERNAL, message="reported by the worker")
        failed = common_pb2.FINISH_REASON_ERROR

        async def answered() -> bool:
            await self.worker.connected()
            extras = [worker_pb2.TokenExtra(slot=slot, finish_reason=failed, error=error) for slot in self._newest()]
            self.worker.send(worker_pb2.TokenBatch(extras=extras))
            return 500 in self.answers

        await until(answered, pause_s=0.1)

    def _newest(self) -> list[int]:
        """Slots of the requests that started last, more than run at a time."""
        return list(self.worker.starts)[-VICTIMS * 4 :]

    async def send_garbage(self, seed: int) -> None:
        """Sends one frame that ends the session, from a worker of its own."""
        async with HostileWorker(f"garbage-{seed}", "tekken") as worker:
            attached = await worker.attach(self._suite.address("router"))
            await worker.connected()
            worker.send(Frames(seed, []).garbage())
            await worker.until(lambda: not worker.sessions)
            await attached.close()

    async def check(self) -> None:
        """Fails when an honest answer differed or a victim was not answered properly."""
        self.honest.check()
        for victim in self._victims:
            if victim.done():
                victim.result()


@pytest.mark.parametrize("frames", [FRAMES, pytest.param(SLOW_FRAMES, marks=pytest.mark.slow)])
def test_honest_streams_beside_random_frames_of_a_hostile_worker_are_undisturbed(attacked: Suite, frames: int) -> None:
    arena = Arena(attacked)
    arena.run(arena.open())

    class Attack(RuleBasedStateMachine):
        @initialize(seed=st.integers(0, 2**32))
        def send_first_frames(self, seed: int) -> None:
            arena.run(arena.attack(seed))

        @rule(seed=st.integers(0, 2**32))
        def send_frames(self, seed: int) -> None:
            arena.run(arena.attack(seed))

        @rule(seed=st.integers(0, 2**32))
        def garbage(self, seed: int) -> None:
            arena.run(arena.send_garbage(seed))

        @rule()
        def reconnect(self) -> None:
            arena.worker.close_sessions()

        def teardown(self) -> None:
            arena.run(arena.check())

    try:
        while arena.worker.sent < frames:
            run_state_machine_as_test(
                Attack,
                settings=settings(
                    max_examples=1 if frames == FRAMES else 5,
                    stateful_step_count=4 if frames == FRAMES else 10,
                    deadline=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                    database=None,
                ),
            )
        assert arena.worker.starts, "no request ran on the hostile worker"
        arena.run(arena.fail_a_victim())
    finally:
        arena.run(arena.close())
        arena.stop()
    arena.honest.check()
    assert arena.honest.answers >= STREAMS
    assert 500 in arena.answers
    unhandled = [at for at, line in enumerate(attacked.output) if "Traceback" in line]
    assert not unhandled, "".join(attacked.output[unhandled[0] - 1 : unhandled[0] + 60])
