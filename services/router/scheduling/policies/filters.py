"""Built-in filters."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.scheduling.policies.contract import Candidate, Filter, PolicyRequest
from services.router.scheduling.policies.parameters import flag, share, text, whole


class CapabilityFilter(Filter):
    """Keeps the workers whose engine has a capability.

    Args:
        has: name of the capability.
    """

    def __init__(self, *, has: str) -> None:
        self._has = text("has", has)

    def keep(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Returns the candidates that report the capability."""
        return [candidate for candidate in candidates if self._has in candidate.capabilities]


class LabelFilter(Filter):
    """Keeps the workers with a label of a value, which may come from a header of the request.

    Args:
        name: of the label.
        value: of the label.
        header: name of a header with the value; requests without it use `value`, or keep all workers without one.
    """

    def __init__(self, *, name: str, value: str = "", header: str = "") -> None:
        if not value and not header:
            raise ValueError("value or header must be set")
        self._name = text("name", name)
        self._value = text("value", value) if value != "" else ""
        self._header = text("header", header).lower() if header != "" else ""

    def keep(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Returns the candidates with the label."""
        value = (self._header and request.headers.get(self._header)) or self._value
        return [each for each in candidates if each.labels.get(self._name) == value] if value else candidates


class WorkerFilter(Filter):
    """Keeps the workers whose id begins with a text, which may come from a header of the request.

    Args:
        prefix: beginning of the ids.
        header: name of a header with the beginning of the ids; requests without it use `prefix`.
    """

    def __init__(self, *, prefix: str = "", header: str = "") -> None:
        if not prefix and not header:
            raise ValueError("prefix or header must be set")
        self._prefix = text("prefix", prefix) if prefix != "" else ""
        self._header = text("header", header).lower() if header != "" else ""

    def keep(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Returns the candidates with this beginning of their ids."""
        prefix = (self._header and request.headers.get(self._header)) or self._prefix
        return [candidate for candidate in candidates if candidate.worker_id.startswith(prefix)]


class PrefixCacheFilter(Filter):
    """Keeps the ranks that hold at least a share of the prompt; all of them if none does.

    Args:
        least: share of the prompt's blocks, 0 to 1.
        strict: keep none if none holds the share.
    """

    def __init__(self, *, least: float, strict: bool = False) -> None:
        self._least = share("least", least)
        self._strict = flag("strict", strict)

    def keep(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Returns the candidates with the share of the prompt."""
        least = self._least * request.prompt_blocks
        kept = [candidate for candidate in candidates if candidate.overlap_blocks >= least]
        return kept if kept or self._strict else candidates


class RequestsFilter(Filter):
    """Keeps the ranks with fewer reserved requests than a number; all of them if none has fewer.

    Busy thresholds of the router are exact over all replicas; this filter uses the loads last read.

    Args:
        below: number of requests.
    """

    def __init__(self, *, below: int) -> None:
        self._below = whole("below", below, 1, 1_000_000)

    def keep(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Returns the candidates with fewer requests."""
        return [candidate for candidate in candidates if candidate.requests < self._below] or candidates
