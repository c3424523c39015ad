"""Built-in scorers."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.scheduling.policies.contract import Candidate, PolicyRequest, Scorer
from services.router.scheduling.policies.parameters import number
from services.router.state.reservations.cost import PREFILL_LOAD_SCALE


def lowest_best(values: Sequence[float]) -> list[float]:
    """Returns 1 for the lowest value, 0 for the highest and in between in proportion; all 1 if they are equal."""
    low, high = min(values), max(values)
    if high == low:
        return [1.0] * len(values)
    return [(high - value) / (high - low) for value in values]


class PrefixCacheScorer(Scorer):
    """Scores the share of the prompt that a rank holds or is expected to hold."""

    def score(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """Returns the shares."""
        blocks = max(request.prompt_blocks, 1)
        return [min(candidate.overlap_blocks / blocks, 1.0) for candidate in candidates]


class LoadScorer(Scorer):
    """Scores reserved load: 1 for the least loaded rank, 0 for the most loaded one.

    Args:
        prefill_scale: weight of a block to compute relative to a block that is only kept.
    """

    def __init__(self, *, prefill_scale: float = PREFILL_LOAD_SCALE) -> None:
        self._scale = number("prefill_scale", prefill_scale)

    def score(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """Returns 1 to 0 in proportion to the load."""
        return lowest_best([self._scale * each.prefill_blocks + each.decode_blocks for each in candidates])


class RequestsScorer(Scorer):
    """Scores the number of reserved requests: 1 for the fewest, 0 for the most."""

    def score(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """Returns 1 to 0 in proportion to the requests."""
        return lowest_best([candidate.requests for candidate in candidates])


class CostScorer(Scorer):
    """Scores the cost of policy `kv`: 1 for the cheapest rank, 0 for the most expensive one."""

    def score(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """Returns 1 to 0 in proportion to the cost."""
        return lowest_best([candidate.cost for candidate in candidates])


class SessionScorer(Scorer):
    """Scores 1 for the rank of the session's previous request, 0 for others."""

    def score(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """Returns 1 or 0 each."""
        return [float(candidate.in_session) for candidate in candidates]
