"""Built-in pickers."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from services.router.scheduling.policies.contract import Picker, PolicyRequest, T
from services.router.scheduling.policies.parameters import share, whole


def by_score(candidates: Sequence[T], scores: Sequence[float]) -> list[list[T]]:
    """Returns the candidates in groups of equal scores, highest first."""
    groups: dict[float, list[T]] = {}
    for candidate, score in zip(candidates, scores, strict=True):
        groups.setdefault(score, []).append(candidate)
    return [groups[score] for score in sorted(groups, reverse=True)]


class MaxScore(Picker):
    """Prefers the candidates with the highest score.

    Args:
        within: scores at most this much below the highest are as good as the highest.
    """

    def __init__(self, within: float = 0.0) -> None:
        self._within = share("within", within)

    def pick(self, request: PolicyRequest, candidates: Sequence[T], scores: Sequence[float]) -> Sequence[Sequence[T]]:
        """Returns the candidates with the highest score, then the others by score."""
        least = max(scores) - self._within
        return by_score(candidates, [2.0 if score >= least else score for score in scores])


class WeightedRandom(Picker):
    """Draws candidates at random, each with a probability in proportion to its score.

    Args:
        random: source of random numbers.
        sharpness: power to which scores are raised; a higher one prefers the best more strongly.
    """

    def __init__(self, random: Random | None = None, /, *, sharpness: int = 1) -> None:
        self._random = random or Random()
        self._sharpness = whole("sharpness", sharpness, 1, 64)

    def pick(self, request: PolicyRequest, candidates: Sequence[T], scores: Sequence[float]) -> Sequence[Sequence[T]]:
        """Returns the candidates in the order drawn, without replacement; those with score 0 come last."""
        keys = [
            (self._random.random() ** (1 / weight) if (weight := score**self._sharpness) else 0.0) for score in scores
        ]
        order = sorted(range(len(candidates)), key=lambda at: (keys[at], self._random.random()), reverse=True)
        return [[candidates[at]] for at in order]


class RoundRobinPicker(Picker):
    """Cycles through the candidates in order of name, whatever their scores."""

    def __init__(self) -> None:
        self._turn = -1

    def pick(self, request: PolicyRequest, candidates: Sequence[T], scores: Sequence[float]) -> Sequence[Sequence[T]]:
        """Returns the next candidate."""
        self._turn += 1
        ordered = sorted(candidates, key=lambda candidate: (candidate.worker_id, candidate.rank))
        return [[ordered[self._turn % len(ordered)]]]


class RandomPicker(Picker):
    """Picks one candidate uniformly at random, whatever the scores."""

    def __init__(self, random: Random | None = None, /) -> None:
        self._random = random or Random()

    def pick(self, request: PolicyRequest, candidates: Sequence[T], scores: Sequence[float]) -> Sequence[Sequence[T]]:
        """Returns one candidate."""
        return [[self._random.choice(candidates)]]


class PowerOfTwoPicker(Picker):
    """Picks the better of two random candidates."""

    def __init__(self, random: Random | None = None, /) -> None:
        self._random = random or Random()

    def pick(self, request: PolicyRequest, candidates: Sequence[T], scores: Sequence[float]) -> Sequence[Sequence[T]]:
        """Returns two random candidates, or the only one, by score."""
        drawn = self._random.sample(range(len(candidates)), min(2, len(candidates)))
        return by_score([candidates[at] for at in drawn], [scores[at] for at in drawn])
