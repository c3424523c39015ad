"""Finds the stages of composed policies by name: built-in ones, entry points of the group `sluice.policies`, or
`package.module:Class`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

from services.common.packages.extensions import POLICIES, find_extension, installed_names
from services.router.scheduling.policies import filters, pickers, scorers
from services.router.scheduling.policies.contract import Filter, Picker, Scorer


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


def stage_names(*kinds: str) -> list[str]:
    """Returns the built-in names of kinds and the installed entry points, which may be of any kind."""
    return sorted({*(name for kind in kinds for name in BUILT_IN_STAGES[kind]), *installed_names(POLICIES)})


def make_stage(kind: str, name: str, parameters: Mapping[str, Any]) -> Stage:
    """Returns a new stage.

    Args:
        kind: "filter", "scorer" or "picker".

    Raises:
        BadParameters: the message begins with the name of the parameter, if one is at fault.
        ValueError: the name is unknown, or the stage cannot be loaded.
    """
    stage = BUILT_IN_STAGES[kind].get(name) or find_stage(name, kind)
    try:
        inspect.signature(stage).bind(**parameters)
    except TypeError as error:
        found = inspect.signature(stage).parameters.values()
        known = ", ".join(each.name for each in found if each.kind is not inspect.Parameter.POSITIONAL_ONLY) or "none"
        raise BadParameters(f"{error}; the parameters of {name} are: {known}") from None
    try:
        return stage(**parameters)
    except ValueError as error:
        raise BadParameters(str(error)) from None
    except Exception as error:
        raise BadParameters(f"constructing {name} raised {type(error).__name__}: {error}") from None


def find_stage(name: str, *kinds: str) -> type[Stage]:
    """Imports and returns a stage that is not built in.

    Args:
        kinds: what it may be: "filter", "scorer" or "picker".

    Raises:
        ValueError: the name is unknown, or the stage cannot be loaded.
    """
    module, colon, attribute = name.partition(":")
    found: Any
    try:
        if extension := find_extension(POLICIES, name):
            found = extension.load()
        elif colon:
            found = getattr(importlib.import_module(module), attribute)
        else:
            names = ", ".join(stage_names(*kinds))
            raise ValueError(f"unknown {' or '.join(kinds)} {name!r}; use one of {names}, or package.module:Class")
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{name}: loading it raised {type(error).__name__}: {error}") from None
    classes: Any = tuple(KINDS[kind] for kind in kinds)
    if not (isinstance(found, type) and issubclass(found, classes)):
        bases = " or ".join(KINDS[kind].__name__ for kind in kinds)
        raise ValueError(f"{name}: it is not a {' or '.join(kinds)}: derive it from sluice.policies.{bases}")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(vars(found)["__abstractmethods__"]))
        raise ValueError(f"{name}: it lacks the method {missing}")
    return found
