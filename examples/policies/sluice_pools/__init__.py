"""Stages of routing policies: a filter, a scorer and a picker."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TypeVar

from sluice.policies import Candidate, Filter, Picker, PolicyRequest, PolicyTarget, Scorer

T = TypeVar("T", bound=PolicyTarget)


class TenantPool(Filter):
    """Keeps the workers of the request's tenant, whose ids begin with its name, such as `acme-3`.

    Args:
        header: header of the request with the name of the tenant.
        shared: pool of requests without the header, and of tenants without workers.
    """

    def __init__(self, *, header: str, shared: str) -> None:
        if not header or header != header.lower():
            raise ValueError(f"header must be a name in lower case, not {header!r}")
        self._header = header
        self._shared = shared

    def keep(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Returns the candidates of the tenant's pool, or of the shared one."""
        tenant = request.headers.get(self._header, self._shared)
        own = [candidate for candidate in candidates if candidate.worker_id.startswith(f"{tenant}-")]
        return own or [candidate for candidate in candidates if candidate.worker_id.startswith(f"{self._shared}-")]


class FreeBlocks(Scorer):
    """Scores the share of a rank's KV blocks that no request has reserved."""

    def score(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """Returns the shares."""
        return [1 - min(each.decode_blocks / max(each.total_blocks, 1), 1) for each in candidates]


class Sticky(Picker):
    """Sends the requests of a session to one rank, without storing anything: the one with the highest hash.

    When that rank is busy or gone, the next one in the order of the hashes takes over. Requests without a session go to
    the candidate with the highest score.
    """

    def pick(self, request: PolicyRequest, candidates: Sequence[T], scores: Sequence[float]) -> Sequence[Sequence[T]]:
        """Returns each candidate in a group of its own."""

        def order(at: int) -> tuple[float, bytes]:
            name = f"{request.session_id} {candidates[at].worker_id} {candidates[at].rank}"
            return 0.0 if request.session_id else scores[at], sha256(name.encode()).digest()

        return [[candidates[at]] for at in sorted(range(len(candidates)), key=order, reverse=True)]
