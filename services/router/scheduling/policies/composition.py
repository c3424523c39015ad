"""A composed policy: its filters, scorers and picker, and how they rank candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from services.router.scheduling.policies.contract import Candidate, Filter, PolicyRequest, Scorer
from services.router.scheduling.policies.stages import BadParameters, is_built_in, make_stage

MAX_PIPELINES = 4096
"""Pipelines of policies, models and parts that are kept; with one more, all of them start anew."""


class StageFailed(Exception):
    """A stage raised, or returned something that its contract does not allow."""


@dataclass(frozen=True, slots=True)
class StageConfig:
    """A stage of a policy file.

    Attributes:
        kind: "filter", "scorer" or "picker".
        weight: of a scorer.
        where: file, line and field, for messages.
        where_parameters: the same for each parameter, and for "" of all of them.
    """

    kind: str
    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    where: str = ""
    where_parameters: dict[str, str] = field(default_factory=dict)

    def place(self, error: ValueError) -> str:
        """Returns file, line and field of an error of `make_stage`."""
        if not isinstance(error, BadParameters):
            return self.where
        places = self.where_parameters
        return places.get(str(error).partition(" ")[0]) or places.get("", self.where)


@dataclass(frozen=True, slots=True)
class Composition:
    """A policy of a policy file.

    Attributes:
        cost: "kv" or "load": what the store compares among candidates that the picker puts into one group.
        on_failure: "reject" or "ignore"; empty: rejects if it has filters, which would otherwise be left out.
    """

    name: str
    filters: tuple[StageConfig, ...] = ()
    scorers: tuple[StageConfig, ...] = ()
    picker: StageConfig = StageConfig("picker", "max_score")
    cost: str = "kv"
    on_failure: str = ""

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        """All stages in order."""
        return (*self.filters, *self.scorers, self.picker)

    @property
    def rejects(self) -> bool:
        """Whether a query fails with the policy; otherwise it is routed by policy `kv`."""
        return self.on_failure == "reject" or (not self.on_failure and bool(self.filters))

    @property
    def built_in(self) -> bool:
        """Whether every stage is built in."""
        return all(is_built_in(stage.kind, stage.name) for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Ranking:
    """The result of a composed policy, by position in the sequence of candidates.

    Attributes:
        kept: candidates that passed the filters.
        scores: score of each of `kept`.
        groups: candidates in the picker's order.
    """

    kept: list[int]
    scores: list[float]
    groups: list[list[int]]


class StagePipeline:
    """The stages of one composed policy for one model and part; pickers may have state.

    Raises:
        ValueError: a stage cannot be made; the message names file, line and field.
    """

    def __init__(self, composition: Composition) -> None:
        self._filters: list[tuple[str, Filter]] = []
        self._scorers: list[tuple[str, float, Scorer]] = []
        for config in composition.stages:
            try:
                stage = make_stage(config.kind, config.name, config.parameters)
            except ValueError as error:
                raise ValueError(f"{config.place(error)}: {error}") from None
            if isinstance(stage, Filter):
                self._filters.append((config.name, stage))
            elif isinstance(stage, Scorer):
                self._scorers.append((config.name, config.weight, stage))
            else:
                self._picker, self._picker_name = stage, config.name

    def rank(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Ranking:
        """Returns the ranking of at least one candidate; its groups are empty if the filters keep none.

        Raises:
            StageFailed: names the stage that raised or broke its contract.
        """
        positions = {(each.worker_id, each.rank): at for at, each in enumerate(candidates)}
        kept = tuple(candidates)  # which no stage can reorder
        for name, stage in self._filters:
            kept = tuple(_subset(name, _run(name, stage.keep, request, kept), kept))
            if not kept:
                return Ranking([], [], [])
        scores = self._scores(request, kept)
        groups = _run(self._picker_name, self._picker.pick, request, kept, scores)
        named = _groups(self._picker_name, groups, kept)
        at = [positions[each.worker_id, each.rank] for each in kept]
        return Ranking(at, scores, [[positions[each.worker_id, each.rank] for each in group] for group in named])

    def _scores(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> list[float]:
        totals = [0.0] * len(candidates)
        weights = sum(weight for _, weight, _ in self._scorers)
        for name, weight, scorer in self._scorers:
            scores = _run(name, scorer.score, request, candidates)
            for at, score in enumerate(_checked_scores(name, scores, len(candidates))):
                totals[at] += weight * score / weights
        return [min(total, 1.0) for total in totals]


class StagePipelines:
    """A pipeline of each policy for each model and part, because pickers may have state.

    Raises:
        ValueError: a stage cannot be made.
    """

    def __init__(self, compositions: Sequence[Composition]) -> None:
        self._compositions = {composition.name: composition for composition in compositions}
        for composition in compositions:
            StagePipeline(composition)
        self._made: dict[tuple[str, str, str], StagePipeline] = {}

    def rank(self, policy: str, request: PolicyRequest, candidates: Sequence[Candidate]) -> Ranking:
        """Returns the ranking of a policy; raises StageFailed."""
        key = (policy, request.model, request.part)
        pipeline = self._made.get(key)
        if pipeline is None:
            if len(self._made) >= MAX_PIPELINES:
                self._made.clear()
            pipeline = self._made[key] = StagePipeline(self._compositions[policy])
        return pipeline.rank(request, candidates)


def _run(name: str, stage: Any, *arguments: Any) -> Any:
    try:
        return stage(*arguments)
    except Exception as error:
        raise StageFailed(f"{name} raised {type(error).__name__}: {error}") from error


def _checked_scores(name: str, scores: Any, count: int) -> list[float]:
    try:
        found = list(scores)
    except TypeError:
        raise StageFailed(f"{name} returned {type(scores).__name__} instead of a sequence of scores") from None
    if len(found) != count:
        raise StageFailed(f"{name} returned {len(found)} scores for {count} candidates")
    for score in found:
        if not isinstance(score, Real) or not 0 <= float(score) <= 1:  # not NaN either
            raise StageFailed(f"{name} returned the score {score!r}; a score is a finite number from 0 to 1")
    return [float(score) for score in found]


def _subset(name: str, returned: Any, given: Sequence[Candidate]) -> list[Candidate]:
    """Returns candidates that a stage returned, in the given order; raises StageFailed for others and repetitions."""
    known = {(each.worker_id, each.rank): each for each in given}
    try:
        keys = [(each.worker_id, each.rank) for each in returned]
    except (TypeError, AttributeError):
        raise StageFailed(f"{name} returned something other than candidates") from None
    if len(set(keys)) < len(keys) or not known.keys() >= set(keys):
        raise StageFailed(f"{name} returned a candidate twice or one that it was not given")
    wanted = set(keys)
    return [each for key, each in known.items() if key in wanted]


def _groups(name: str, groups: Any, given: Sequence[Candidate]) -> list[list[Candidate]]:
    try:
        found = [list(group) for group in groups]
    except TypeError:
        raise StageFailed(f"{name} returned something other than groups of candidates") from None
    flat = [each for group in found for each in group]
    if not flat:
        raise StageFailed(f"{name} picked no candidate")
    _subset(name, flat, given)
    return [group for group in found if group]
