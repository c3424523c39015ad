"""Where a request asks to run. Whatever API it speaks, its pipeline sees it: a context variable, as the deadline is."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace

MOST_RANKS = 65_536


@dataclass(frozen=True, slots=True)
class Directions:
    """What a request says about the workers that run it. Workers go by id or by host:port.

    Attributes:
        workers: who answers, the best first; empty: not said.
        endpoints: the same, as a scheduler in front of gateways says it: with routing discover it is the gateway.
        prefill: who computes the prompt; empty: not said.
        rank: data-parallel rank of the worker that answers; None: not said.
        prefill_rank: of the other one.
        subset: who may be chosen at all; None: everybody.
        token_ids: packed u32; the prompt, in place of the one that the client wrote.
        query_only: the request wants to know who would run it, and to run nothing.
    """

    workers: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    rank: int | None = None
    prefill_rank: int | None = None
    subset: tuple[str, ...] | None = None
    token_ids: bytes | None = None
    query_only: bool = False

    def over(self, other: Directions) -> Directions:
        """Both; where both say something, this counts. Names of workers and their ranks count together."""
        return Directions(
            workers=self.workers or (() if self.endpoints else other.workers),
            endpoints=self.endpoints,
            prefill=self.prefill or other.prefill,
            rank=self.rank if self.workers or self.endpoints or self.rank is not None else other.rank,
            prefill_rank=self.prefill_rank if self.prefill or self.prefill_rank is not None else other.prefill_rank,
            subset=self.subset if self.subset is not None else other.subset,
            token_ids=self.token_ids if self.token_ids is not None else other.token_ids,
            query_only=self.query_only or other.query_only,
        )

    @property
    def answering(self) -> tuple[str, ...]:
        """Who answers, where the router chooses nobody."""
        return self.workers or self.endpoints

    def allows(self, worker_id: str, address: str, prefill: bool) -> bool:
        """Whether the router may choose a worker, which is a `prefill` worker or one that answers."""
        if self.subset is not None and worker_id not in self.subset and address not in self.subset:
            return False
        names = self.prefill if prefill else self.workers
        return not names or worker_id in names or address in names


NOWHERE = Directions()

_current: ContextVar[Directions] = ContextVar("directions", default=NOWHERE)


def current() -> Directions:
    """Of the request at hand."""
    return _current.get()


def add(said: Directions) -> None:
    """The body of the request at hand says something, too; its headers come first."""
    _current.set(_current.get().over(said))


def at_rank(rank: int) -> None:
    """The body of the request at hand names the data-parallel rank of its worker, whoever that is."""
    said = _current.get()
    if said.rank is None:
        _current.set(replace(said, rank=rank))


def begin(said: Directions) -> None:
    """A request begins."""
    _current.set(said)
