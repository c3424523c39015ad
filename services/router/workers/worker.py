"""Workers as the router knows them."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from services.router.workers.claims import Claim

KV_EVENTS = "kv_events"  # capability: the engine reports what it caches


class Role(IntEnum):
    """The part a worker plays; the numbers of `sluice.v1.WorkerRole`."""

    AGGREGATED = 1
    PREFILL = 2
    DECODE = 3


class WorkerRank(NamedTuple):
    """One data-parallel rank of one worker: what a cache belongs to and what a request is booked on."""

    worker_id: str
    rank: int

    @property
    def field(self) -> str:
        """Its name in the load book."""
        return f"{self.worker_id}/{self.rank}"

    @classmethod
    def of_field(cls, field: str) -> WorkerRank:
        """The slot behind `field`."""
        worker_id, _, rank = field.rpartition("/")
        return cls(worker_id, int(rank))


@lru_cache(maxsize=8_192)  # asked for at every decision, of every worker
def _slots(worker_id: str, ranks: int) -> tuple[WorkerRank, ...]:
    return tuple(WorkerRank(worker_id, rank) for rank in range(ranks))


class UnreadableWorker(ValueError):
    """What a store keeps of a worker says nothing here: a newer router wrote it, or it is broken."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A registered worker; constant for its epoch but for `draining`.

    `total_blocks` bounds what the index takes per rank and tier. `document` is what the transport wants back when it
    describes this worker; the domain does not look into it. `capabilities` is what the card says its engine can do,
    `adapters` the LoRA adapters it holds now. `caller` and `lease_digest` identify its process, as in Claim.
    """

    worker_id: str
    address: str
    epoch: int
    model: str
    role: Role
    block_size: int
    hash_scheme: str
    total_blocks: int
    ranks: int
    document: bytes
    draining: bool = False
    capabilities: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    caller: str = ""
    lease_digest: str = ""

    @property
    def holder(self) -> str:
        """The process: registrations with the same one are of the same process."""
        return f"{self.caller} {self.lease_digest}".strip()

    @property
    def claim(self) -> Claim:
        """What the process claims with its registration."""
        return Claim(self.worker_id, self.epoch, self.caller, self.lease_digest)

    @property
    def slots(self) -> tuple[WorkerRank, ...]:
        """One per data-parallel rank."""
        return _slots(self.worker_id, self.ranks)

    def to_json(self) -> str:
        """As a store keeps it; `draining` is kept beside it."""
        fields = asdict(self)
        del fields["draining"]
        return json.dumps(fields | {"document": base64.b64encode(self.document).decode()})

    @classmethod
    def from_json(cls, text: str | bytes, draining: bool = False) -> Worker:
        """Undoes `to_json`; fields that another version of the router keeps beside these are left out.

        Raises:
            UnreadableWorker: no worker that can be told here, as one with a role that only a newer router knows.
        """
        try:
            kept = {name: value for name, value in json.loads(text).items() if name in _KEPT}
            kept["role"] = Role(kept["role"])
            kept["document"] = base64.b64decode(kept["document"])
            for name in ("capabilities", "adapters"):
                kept[name] = tuple(kept.get(name, ()))
            return cls(**kept, draining=draining)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UnreadableWorker(f"{type(error).__name__}: {error}") from error


_KEPT = frozenset(field.name for field in fields(Worker)) - {"draining"}


def holding(workers: Sequence[Worker], adapter: str) -> Sequence[Worker]:
    """Those that hold a LoRA adapter; all where none says so, for the worker knows best and refuses what it lacks."""
    if not adapter:
        return workers
    return [worker for worker in workers if adapter in worker.adapters] or workers
