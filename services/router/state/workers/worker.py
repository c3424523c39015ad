"""Registered workers and their data-parallel ranks."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import NamedTuple

from services.common.types.generation import Role as Role
from services.router.state.workers.claims import Claim

KV_EVENTS = "kv_events"  # capability: the engine reports KV events


class WorkerRank(NamedTuple):
    """A data-parallel rank of a worker: the unit that has a cache and on which requests are reserved."""

    worker_id: str
    rank: int

    @property
    def field(self) -> str:
        """Its name in the store."""
        return f"{self.worker_id}/{self.rank}"

    @classmethod
    def of_field(cls, field: str) -> WorkerRank:
        """Returns the rank named by `field`."""
        worker_id, _, rank = field.rpartition("/")
        return cls(worker_id, int(rank))


@lru_cache(maxsize=8_192)  # called for every worker at every decision
def _slots(worker_id: str, ranks: int) -> tuple[WorkerRank, ...]:
    return tuple(WorkerRank(worker_id, rank) for rank in range(ranks))


class UnreadableWorker(ValueError):
    """A stored worker record cannot be parsed: it was written by a newer router, or is corrupt."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A registered worker; constant within its epoch except for `draining`.

    Attributes:
        total_blocks: maximum blocks in the index per rank and tier.
        document: opaque description of the worker for the transport.
        capabilities: of the engine, from the model card.
        adapters: LoRA adapters loaded now.
        http_address: host:port of the engine's own HTTP server; empty: none.
        labels: names and values given by the operator, in order of name.
        caller: identifies the process together with `lease_digest`, as in Claim.
        fingerprint: of its tokenizer's files; `prompt_fingerprint` of the ids that it gives to fixed chats.
        named_by_server: the engine's server chose the model's name, not the operator.
        handoff_form: form of what it hands over to, or takes from, the other half of a pair; empty: unknown.
        set_aside: why it receives no requests, as in `joining`; empty: it does.
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
    http_address: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    fingerprint: str = ""
    prompt_fingerprint: str = ""
    named_by_server: bool = False
    handoff_form: str = ""
    set_aside: str = ""

    @property
    def accepts(self) -> bool:
        """Whether it receives new requests."""
        return not self.draining and not self.set_aside

    @property
    def holder(self) -> str:
        """Identifier of the worker's process; equal for registrations of the same process."""
        return f"{self.caller} {self.lease_digest}".strip()

    @property
    def claim(self) -> Claim:
        """The claim made by registering."""
        return Claim(self.worker_id, self.epoch, self.caller, self.lease_digest)

    @property
    def slots(self) -> tuple[WorkerRank, ...]:
        """All data-parallel ranks."""
        return _slots(self.worker_id, self.ranks)

    def to_json(self) -> str:
        """Returns the record to store, without `draining`, which is stored separately."""
        fields = asdict(self)
        del fields["draining"]
        return json.dumps(fields | {"document": base64.b64encode(self.document).decode()})

    @classmethod
    def from_json(cls, text: str | bytes, draining: bool = False) -> Worker:
        """Returns a worker from its record; ignores fields added by other versions of the router.

        Raises:
            UnreadableWorker: the record cannot be parsed, such as one with a role added by a newer router.
        """
        try:
            stored = {name: value for name, value in json.loads(text).items() if name in _STORED_FIELDS}
            stored["role"] = Role(stored["role"])
            stored["document"] = base64.b64decode(stored["document"])
            for name in ("capabilities", "adapters"):
                stored[name] = tuple(stored.get(name, ()))
            stored["labels"] = tuple((str(name), str(value)) for name, value in stored.get("labels", ()))
            return cls(**stored, draining=draining)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UnreadableWorker(f"{type(error).__name__}: {error}") from error


_STORED_FIELDS = frozenset(field.name for field in fields(Worker)) - {"draining"}


def with_adapter(workers: Sequence[Worker], adapter: str) -> Sequence[Worker]:
    """Returns the workers with a LoRA adapter; all if none reports it, as a worker without it rejects the request."""
    if not adapter:
        return workers
    return [worker for worker in workers if adapter in worker.adapters] or workers
