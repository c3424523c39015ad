"""Where a request asks to run. Whatever API it speaks, its pipeline sees it: a context variable, as the deadline is."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

MOST_RANKS = 65_536
USUAL_SOURCES = {
    "workers": "x-sluice-worker",
    "endpoints": "x-gateway-destination-endpoint",
    "prefill": "x-sluice-prefill-worker",
    "rank": "x-sluice-dp-rank",
    "prefill_rank": "x-sluice-prefill-dp-rank",
    "subset": "x-gateway-destination-endpoint-subset",
}
"""Headers in which parts of Directions arrive when their `sources` do not tell."""


@dataclass(frozen=True, slots=True)
class RoutingHints:
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
        sources: by attribute, the header or the body's field it was read from; for errors.
    """

    workers: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    rank: int | None = None
    prefill_rank: int | None = None
    subset: tuple[str, ...] | None = None
    token_ids: bytes | None = None
    query_only: bool = False
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def over(self, other: RoutingHints) -> RoutingHints:
        """Returns both; where both have a part, this one's counts. Names of workers and their ranks count together."""
        answering, prefilling = bool(self.workers or self.endpoints), bool(self.prefill)
        own = {
            "workers": answering,
            "endpoints": True,
            "prefill": prefilling,
            "rank": answering or self.rank is not None,
            "prefill_rank": prefilling or self.prefill_rank is not None,
            "subset": self.subset is not None,
            "token_ids": self.token_ids is not None,
        }
        chosen = {name: self if counts else other for name, counts in own.items()}
        parts: dict[str, Any] = {name: getattr(one, name) for name, one in chosen.items()}
        sources = {name: one.sources[name] for name, one in chosen.items() if name in one.sources}
        return RoutingHints(**parts, query_only=self.query_only or other.query_only, sources=sources)

    def source(self, part: str) -> str:
        """Returns the header, or the body's field, that an attribute was read from."""
        return self.sources.get(part) or USUAL_SOURCES[part]

    @property
    def answering_source(self) -> str:
        """Where the worker that answers was named."""
        return self.source("workers" if self.workers else "endpoints")

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


def described(source: str) -> str:
    """Returns a source as an error message names it."""
    return f"the header {source}" if source.startswith("x-") else source


NO_HINTS = RoutingHints()

_current: ContextVar[RoutingHints] = ContextVar("hints", default=NO_HINTS)


def current() -> RoutingHints:
    """Of the request at hand."""
    return _current.get()


def add(said: RoutingHints) -> None:
    """The body of the request at hand says something, too; its headers come first."""
    _current.set(_current.get().over(said))


def at_rank(rank: int) -> None:
    """The body of the request at hand names the data-parallel rank of its worker, whoever that is."""
    said = _current.get()
    if said.rank is None:
        _current.set(replace(said, rank=rank, sources={**said.sources, "rank": "data_parallel_rank"}))


def begin(said: RoutingHints) -> None:
    """A request begins."""
    _current.set(said)
