"""Finds the stages of composed policies by name: built-in ones, entry points of the group `sluice.policies`, or
`package.module:Class`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeAlias

from services.router.scheduling.policies import filters, pickers, scorers
from services.router.scheduling.policies.contract import Filter, Picker, Scorer

ENTRY_POINT_GROUP = "sluice.policies"


class BadParameters(ValueError):
    """A stage rejects its parameters."""


Stage: TypeAlias = Filter | Scorer | Picker

KINDS: Mapping[str, type[Stage]] = {"filter": Filter, "scorer": Scorer, "picker": Picker}

BUILT_IN_STAGES: Mapping[str, Mapping[str, type[Stage]]] = {
    "filter": {
        "capability": filters.CapabilityFilter,
        "label": filters.LabelFilter,
        "worker": filters.WorkerFilter,
        "prefix_cache": filters.PrefixCacheFilter,
        "requests": filters.RequestsFilter,
    },
    "scorer": {
        "prefix_cache": scorers.PrefixCacheScorer,
        "load": scorers.LoadScorer,
        "requests": scorers.RequestsScorer,
        "kv_cost": scorers.CostScorer,
        "session": scorers.SessionScorer,
    },
    "picker": {
        "max_score": pickers.MaxScore,
        "weighted_random": pickers.WeightedRandom,
        "round_robin": pickers.RoundRobinPicker,
        "random": pickers.RandomPicker,
        "power_of_two": pickers.PowerOfTwoPicker,
    },
}


def is_built_in(kind: str, name: str) -> bool:
    """Returns whether a stage is built in; other stages run in a process of their own."""
    return name in BUILT_IN_STAGES[kind]


def stage_names(kind: str) -> list[str]:
    """Returns the built-in names of a kind and the installed entry points, which may be of any kind."""
    return sorted({*BUILT_IN_STAGES[kind], *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def make_stage(kind: str, name: str, parameters: Mapping[str, Any]) -> Stage:
    """Returns a new stage.

    Args:
        kind: "filter", "scorer" or "picker".

    Raises:
        BadParameters: the message begins with the name of the parameter, if one is at fault.
        ValueError: the name is unknown, or the stage cannot be loaded.
    """
    stage = BUILT_IN_STAGES[kind].get(name) or _load(kind, name)
    try:
        inspect.signature(stage).bind(**parameters)
    except TypeError as error:
        known = ", ".join(_parameters(stage)) or "none"
        raise BadParameters(f"{error}; the parameters of {name} are: {known}") from None
    try:
        return stage(**parameters)
    except ValueError as error:
        raise BadParameters(str(error)) from None
    except Exception as error:
        raise BadParameters(f"constructing {name} raised {type(error).__name__}: {error}") from None


def _parameters(stage: type[Stage]) -> list[str]:
    found = inspect.signature(stage).parameters.values()
    return [each.name for each in found if each.kind is not inspect.Parameter.POSITIONAL_ONLY]


def _load(kind: str, name: str) -> type[Stage]:
    found: Any
    try:
        found = _find(kind, name)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{name}: loading it raised {type(error).__name__}: {error}") from None
    if not (isinstance(found, type) and issubclass(found, KINDS[kind])):
        raise ValueError(f"{name}: it is not a {kind}: derive it from sluice.policies.{KINDS[kind].__name__}")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ValueError(f"{name}: it lacks the method {missing}")
    return found


def _find(kind: str, name: str) -> Any:
    points: list[EntryPoint] = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if points:
        return points[0].load()
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"unknown {kind} {name!r}; use one of {', '.join(stage_names(kind))}, or package.module:Class")
    return getattr(importlib.import_module(module), attribute)
