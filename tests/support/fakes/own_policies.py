"""Stages of policies that break their contract in every way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from sluice.policies import Candidate, Filter, Picker, PolicyRequest, Scorer


class Misbehaving(Scorer):
    """Behaves as the header `do` of the request names."""

    def score(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Any:
        count = len(candidates)
        match request.headers.get("do"):
            case "raise":
                raise RuntimeError("no score today")
            case "hang":
                while True:
                    pass
            case "exit":
                os._exit(3)
            case "nan":
                return [float("nan")] * count
            case "high":
                return [1.5] * count
            case "low":
                return [-0.1] * count
            case "text":
                return ["1"] * count
            case "few":
                return [1.0] * (count - 1)
            case "none":
                return None
            case "memory":
                return [bytes(1 << 33)]
            case "environment":
                raise RuntimeError(f"{sorted(os.environ)}")
            case "change":
                candidates[0].requests = 5  # type: ignore[misc]
            case "reorder":
                candidates.reverse()  # type: ignore[attr-defined]
        return [float(candidate.worker_id == request.headers.get("prefer")) for candidate in candidates]


class Inventing(Filter):
    """Returns a candidate that it was not given."""

    def keep(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return [Candidate("elsewhere", 0)]


class Doubling(Picker):
    """Picks a candidate twice."""

    def pick(self, request: PolicyRequest, candidates: Any, scores: Sequence[float]) -> Any:
        return [[candidates[0]], [candidates[0]]]


class Unmakeable(Scorer):
    """Rejects its parameters."""

    def __init__(self, *, size: int) -> None:
        raise ValueError(f"size must not be {size}")

    def score(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        return []


class Abstract(Scorer):
    """Lacks its method."""
