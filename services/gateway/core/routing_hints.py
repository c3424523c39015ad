"""Hints of a request about the workers that should run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

MAX_RANKS = 65_536
"""Data-parallel ranks that a request may name, from 0; a higher one is refused with INVALID_ARGUMENT."""
USUAL_SOURCES = {
    "workers": "x-sluice-worker",
    "endpoints": "x-gateway-destination-endpoint",
    "prefill": "x-sluice-prefill-worker",
    "rank": "x-sluice-dp-rank",
    "prefill_rank": "x-sluice-prefill-dp-rank",
    "subset": "x-gateway-destination-endpoint-subset",
}
"""Header of each hint, for errors about hints without an entry in `sources`."""


@dataclass(frozen=True, slots=True)
class RoutingHints:
    """Constraints of a request on the workers that run it. Workers are named by id or by host:port.

    Attributes:
        workers: workers for decode (or for the whole request), in order of preference; empty: unset.
        endpoints: the same, as set by a scheduler in front of the gateways; with routing discover these are gateways
            and are ignored here.
        prefill: workers for prefill, in order of preference; empty: unset.
        rank: data-parallel rank of the decode worker; None: unset.
        prefill_rank: data-parallel rank of the prefill worker; None: unset.
        subset: the only workers that may be chosen; None: all.
        token_ids: packed u32; the prompt, in place of the one in the body.
        query_only: return the workers that would be chosen, and run nothing.
        receipt: report the routing decision and what came of it.
        sources: for each attribute, the header or body field it was read from; used in errors.
    """

    workers: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    rank: int | None = None
    prefill_rank: int | None = None
    subset: tuple[str, ...] | None = None
    token_ids: bytes | None = None
    query_only: bool = False
    receipt: bool = False
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def over(self, other: RoutingHints) -> RoutingHints:
        """Returns these hints merged with `other`; these take precedence. A rank is taken along with its worker."""
        has_workers, has_prefill = bool(self.workers or self.endpoints), bool(self.prefill)
        is_set = {
            "workers": has_workers,
            "endpoints": True,
            "prefill": has_prefill,
            "rank": has_workers or self.rank is not None,
            "prefill_rank": has_prefill or self.prefill_rank is not None,
            "subset": self.subset is not None,
            "token_ids": self.token_ids is not None,
        }
        chosen = {name: self if own else other for name, own in is_set.items()}
        values: dict[str, Any] = {name: getattr(hints, name) for name, hints in chosen.items()}
        sources = {name: hints.sources[name] for name, hints in chosen.items() if name in hints.sources}
        return RoutingHints(
            **values,
            query_only=self.query_only or other.query_only,
            receipt=self.receipt or other.receipt,
            sources=sources,
        )

    def with_rank(self, rank: int) -> RoutingHints:
        """Returns these hints with the rank of the request's body, for any worker; a rank in its headers wins."""
        if self.rank is not None:
            return self
        return replace(self, rank=rank, sources={**self.sources, "rank": "data_parallel_rank"})

    def source(self, attribute: str) -> str:
        """Returns the header or body field that an attribute was read from."""
        return self.sources.get(attribute) or USUAL_SOURCES[attribute]

    @property
    def answering_source(self) -> str:
        """The header or body field that names the decode worker."""
        return self.source("workers" if self.workers else "endpoints")

    @property
    def answering(self) -> tuple[str, ...]:
        """Workers for decode, where no router chooses."""
        return self.workers or self.endpoints

    def allows(self, worker_id: str, address: str, prefill: bool) -> bool:
        """Returns whether the router may choose a worker; `prefill` is its role."""
        if self.subset is not None and worker_id not in self.subset and address not in self.subset:
            return False
        names = self.prefill if prefill else self.workers
        return not names or worker_id in names or address in names


def described(source: str) -> str:
    """Returns a source in the form used by error messages."""
    return f"the header {source}" if source.startswith("x-") else source


NO_HINTS = RoutingHints()
