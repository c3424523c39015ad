"""How long routers are degraded when their Redis moves: `python benchmarks/failover.py --runs 3`.

For each topology and fault, starts real redis-servers, two routers and four workers, and keeps 8 requests running, each
reserved at one router and freed at either. Then the master of the model's keys is killed, frozen, replaced as planned,
loses the slot, or the whole cluster is replaced, and the old one returns as a replica. Prints, for each run, the
seconds from the election of the new master to the first request without `degraded`, and the number of requests that
failed and of reservations that were lost or doubled. The exit code is 1 if any of these is not 0, or a run took over
10 s.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the support of the tests starts the servers

from tests.support.clients.reservation_load import ReservationLoad, attach_workers
from tests.support.servers.moving_redis import TOPOLOGIES, MovingRedis
from tests.support.servers.router_child import router_children
from tests.support.servers.router_cluster import MODEL
from tests.support.waiting import until

TAG = f"{{sluice:{MODEL}}}"
MAX_DEGRADED_S = 10.0
CALM_S = 3.0
AFTER_S = 4.0


@dataclass
class Row:
    """The runs of one fault in one topology."""

    topology: str
    fault: str
    seconds: list[float] = field(default_factory=list)
    routed: int = 0
    failed: int = 0
    lost: int = 0
    doubled: int = 0

    @property
    def text(self) -> str:
        """A row of the table."""
        seconds = ", ".join(f"{each:.1f}" for each in self.seconds)
        cells = (self.topology, self.fault, seconds, self.routed, self.failed, self.lost, self.doubled)
        return f"| {' | '.join(map(str, cells))} |"

    @property
    def good(self) -> bool:
        """Whether nothing was lost and every run ended in time."""
        return not (self.failed or self.lost or self.doubled) and max(self.seconds) <= MAX_DEGRADED_S


async def measure(row: Row) -> None:
    """Runs a fault once, and adds what it did to the row."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        async with TOPOLOGIES[row.topology](home, TAG) as place:
            flags = ("--redis-url", place.url)
            async with router_children(2, home, *flags) as routers:
                workers = await attach_workers(routers)
                load = ReservationLoad(routers, TAG)
                running = asyncio.create_task(load.run())
                try:
                    await _fault(row, place, load)
                    load.stop()
                    await asyncio.wait_for(running, 60)
                    found = await load.settled(lambda: place.master().port)
                finally:
                    running.cancel()
                    for worker in workers:
                        await worker.detach()
    row.routed += load.routed
    row.failed += len(load.failed)
    if not found.none:
        print(row.topology, row.fault, found, file=sys.stderr)
    row.lost += len(found.lost)
    row.doubled += len(found.doubled) + abs(found.miscounted)
    for failure in load.failed[:5]:
        print(failure, file=sys.stderr)


async def _fault(row: Row, place: MovingRedis, load: ReservationLoad) -> None:
    began = time.monotonic()
    await until(lambda: load.whole_after(began + CALM_S) is not None, timeout_s=60)
    elected = await place.fault(row.fault)
    await until(lambda: load.whole_after(elected) is not None, timeout_s=120)
    row.seconds.append((load.whole_after(elected) or 0.0) - elected)
    await place.heal()
    healed = time.monotonic()
    await until(lambda: load.whole_after(healed + AFTER_S) is not None, timeout_s=120)


async def main() -> int:
    """Runs what was asked for, and prints the table row by row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=3, help="runs of each fault")
    parser.add_argument("--only", default="", help="topology or topology/fault")
    options = parser.parse_args()
    print("| Redis | master is | degraded, s | requests | failed | lost | doubled |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: |", flush=True)
    good = True
    for topology, place in TOPOLOGIES.items():
        for fault in place.faults:
            row = Row(topology, fault)
            if options.only not in ("", topology, f"{topology}/{fault}"):
                continue
            for _ in range(options.runs):
                await measure(row)
            print(row.text, flush=True)
            good = good and row.good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
