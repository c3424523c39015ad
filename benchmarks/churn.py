"""Workers, replicas and a model arrive and leave at random under load.

    python benchmarks/churn.py --minutes 30 --seed 1

Two preprocess and three postprocess replicas, two routers over a Redis of their own, four workers of one model and the
only one of another are killed, told to stop and started again in an order that the seed decides, while streams run
without a pause and short requests arrive. At least one process of each tier is left alone at any time. Every answer has
to be the one before the churn; a request for the model whose worker is away has to be refused within seconds, and
answered once it is back. Afterwards nothing may be left. The exit code is 1 otherwise.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import grpc
import psutil
import typer
import uvloop
from leftovers import Places, left

sys.path.insert(0, str(Path(__file__).parents[1]))  # the support of the tests starts the suite

from churn_load import DEADLINE_S, GUEST, ChurnLoad, Seen

from services.common.net.ports import free_port
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.data.tiny_vlm import build_qwen2_vl
from tests.support.faults.access import PLAIN, Access
from tests.support.faults.credentials import Credentials
from tests.support.servers.loose_suite import LooseSuite
from tests.support.servers.redis_server import RedisServer

TIERS = {
    "preprocess": ("preprocess", "preprocess-1"),
    "router": ("router", "router-1"),
    "postprocess": ("postprocess-0", "postprocess-1", "postprocess-2"),
    "worker": ("worker-0", "worker-1", "worker-2", "worker-3"),
    GUEST: ("worker-4",),
}
"""The processes of each tier; all but the last one keeps one of them alone."""
STEP_MS = 40
EVERY_S = (0.5, 4.0)
"""Seconds between two events, drawn evenly."""
AWAY_S = (1.0, 8.0)
RESTED_S = 6.0
"""Seconds for which a process that was started is left alone, so that what fails is not its start."""
CALM_S = 5.0

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class ChurnedSuite:
    """A suite to churn, and where to look.

    Attributes:
        metrics: host:port of the metrics of some processes.
        credentials: with which its services trust each other; None: they use plain text.
    """

    suite: LooseSuite
    redis: RedisServer
    metrics: Mapping[str, str]
    credentials: Credentials | None = None

    @property
    def access(self) -> Access:
        """How an operator reaches its services."""
        return PLAIN if self.credentials is None else self.credentials.access()


@dataclass
class Churn:
    """Ends and starts processes of a suite; see the module.

    Attributes:
        tiers: the processes by tier, of which one is left alone at any time; none of the guest model's.
        guest_since: when the guest model's worker was listed by all routers; None: it is away, or comes and goes.
    """

    churned: ChurnedSuite
    draw: random.Random
    tiers: Mapping[str, Sequence[str]] = field(default_factory=lambda: TIERS)
    events: int = 0
    guest_since: float | None = None
    _away: dict[str, float] = field(default_factory=dict)  # until when, by name
    _rested: dict[str, float] = field(default_factory=dict)

    def guest_serves(self) -> bool:
        """Returns whether the guest model has had a worker for long enough that requests must be answered."""
        return self.guest_since is not None and time.monotonic() - self.guest_since > RESTED_S

    async def run(self, until_s: float) -> None:
        """Ends and starts processes until a time, and starts all at the end."""
        while time.monotonic() < until_s:
            await asyncio.sleep(self.draw.uniform(*EVERY_S))
            await self._start_due(time.monotonic())
            self._end_one()
        await self._start_due(float("inf"))
        await asyncio.to_thread(self.churned.suite.wait_ready, len(self.churned.suite.workers))
        await self._until_guest_listed()

    async def _start_due(self, now: float) -> None:
        for name in [name for name, until in self._away.items() if until <= now]:
            del self._away[name]
            await asyncio.to_thread(self.churned.suite.start, name)
            self._rested[name] = time.monotonic() + RESTED_S
            self._print(name, "starts")
            if name in TIERS[GUEST]:
                await self._until_guest_listed()
                self.guest_since = time.monotonic()

    def _end_one(self) -> None:
        now = time.monotonic()
        tier = self.draw.choice([*self.tiers])
        present = [name for name in self.tiers[tier] if name not in self._away and self._rested.get(name, 0.0) < now]
        kept = 0 if tier == GUEST else 1
        name, how = self.draw.choice(self.tiers[tier]), self.draw.choice((signal.SIGKILL, signal.SIGTERM))
        away_s = self.draw.uniform(*AWAY_S)
        if name not in present or len(present) <= kept:
            return
        if tier == GUEST:
            self.guest_since = None
        self.churned.suite.end(name, how)
        self.events += 1
        self._away[name] = now + away_s
        self._print(name, how.name)

    def _print(self, name: str, what: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {name} {what}", file=sys.stderr, flush=True)

    async def _until_guest_listed(self) -> None:
        """Waits until a router that serves lists the guest model's worker, at most `DEADLINE_S` seconds."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if await self._is_guest_listed():
                return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"the worker of model {GUEST} was not listed within {DEADLINE_S:g} s of its start")

    async def _is_guest_listed(self) -> bool:
        access = self.churned.access
        for name in TIERS["router"]:
            async with access.channel(self.churned.suite.address(name), "router") as channel:
                try:
                    request = router_pb2.ListWorkersRequest(model=GUEST)
                    response = await router_pb2_grpc.RouterStub(channel).ListWorkers(request, timeout=2)
                except grpc.aio.AioRpcError:
                    continue
                return bool(response.workers)
        return False


@contextmanager
def churned_suite(
    gateway_flags: tuple[str, ...] = (), measured: Sequence[str] = ("postprocess-0",), secured: bool = False
) -> Iterator[ChurnedSuite]:
    """Runs the suite.

    Args:
        measured: processes other than the gateway that have metrics.
        secured: its services use mutual TLS and tokens between each other.
    """
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(Path(folder))
        redis.start()
        try:
            model = build_qwen2_vl(Path(folder) / "tiny")
            metrics = {name: f"127.0.0.1:{free_port()}" for name in measured}
            flags_of: dict[str, tuple[str, ...]] = dict.fromkeys(TIERS["router"], ("--redis-url", redis.url))
            for name in (*TIERS["preprocess"], *TIERS["postprocess"]):
                flags_of[name] = ("--models", f"{GUEST}={model}")
            flags_of[TIERS[GUEST][0]] = ("--model", f"{GUEST}={model}")
            for name, address in metrics.items():
                flags_of[name] = (*flags_of.get(name, ()), "--metrics-listen", address)
            credentials = Credentials(Path(folder), https=False) if secured else None
            if credentials is not None:
                for name in ("gateway", *(name for names in TIERS.values() for name in names)):
                    flags_of[name] = (*flags_of.get(name, ()), *credentials.flags(name))
            slow = ("--engine-args", f"timing=fixed,fixed_step_ms={STEP_MS}", "--drain-s", "1")
            with LooseSuite(
                model,
                worker_flags=slow,
                gateway_flags=gateway_flags,
                flags_of=flags_of,
                workers=5,
                postprocess=3,
                preprocess=2,
                routers=2,
            ) as suite:
                yield ChurnedSuite(suite, redis, metrics, credentials)
        finally:
            redis.stop()


async def nothing_left(churned: ChurnedSuite) -> dict[str, float]:
    """Returns what is left of all requests, by kind, when nothing more goes away."""
    suite = churned.suite
    gateway = psutil.Process(suite.pid("gateway"))
    workers = tuple(suite.address(name) for name in suite.workers)
    router = suite.address(TIERS["router"][0])
    postprocess = f"http://{churned.metrics['postprocess-0']}"
    remaining = await left(Places(suite.url, postprocess, router, workers, gateway, churned.access.channel))
    del remaining["connections"]  # of the loads' own clients, kept alive
    return remaining


async def run_churn(churned: ChurnedSuite, seed: int, minutes: float, streams: int, rate: float) -> bool:
    """Runs the load beside the churn and prints what became of it; returns whether all is as it has to be."""
    churn = Churn(churned, random.Random(seed), guest_since=time.monotonic())
    load = ChurnLoad(churned.suite.url, streams, rate, churn.guest_serves)
    await load.learn()
    stop = asyncio.Event()
    loading = asyncio.create_task(load.run(stop))
    try:
        await churn.run(time.monotonic() + 60 * minutes)
        longest_s, pause_s = load.seen.longest_s, load.seen.longest_pause_s
        await asyncio.sleep(CALM_S)
    finally:
        stop.set()
        await loading
    remaining = await nothing_left(churned)
    print(f"events: {churn.events}, longest request {longest_s:.1f} s, longest pause in a stream {pause_s:.1f} s")
    report(load.seen, remaining)
    return not load.seen.problems and not any(remaining.values())


def report(seen: Seen, remaining: Mapping[str, float]) -> None:
    """Prints what became of the requests, and what is left of them."""
    for kind, count in sorted(seen.answered.items()):
        print(f"{kind}: {count:,}")
    print("left:", ", ".join(f"{kind} {count:g}" for kind, count in remaining.items()))
    for problem in seen.problems[:50]:
        print("problem:", problem)


@app.command()
def main(
    minutes: Annotated[float, typer.Option(min=0.1, help="time of the churn of each seed")] = 30.0,
    seed: Annotated[list[int] | None, typer.Option(help="decides which process ends when; may be repeated")] = None,
    streams: Annotated[int, typer.Option(min=1, help="streams at a time, without a pause")] = 64,
    rate: Annotated[float, typer.Option(min=0.1, help="short requests a second")] = 20.0,
) -> None:
    """Churn workers, replicas and a model under load."""
    failed = []
    with churned_suite() as churned:
        for number in seed or [1]:
            good = uvloop.run(run_churn(churned, number, minutes, streams, rate))
            failed += [] if good else [number]
            print(f"seed {number}, {minutes:g} minutes: {'all as it has to be' if good else 'FAILED'}", flush=True)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    app()
