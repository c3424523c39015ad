"""Finds what installed packages add to the suite: entry points of the groups `sluice.*`, one name each."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from services.common.errors import MAX_MESSAGE_LENGTH, sentence

ENGINES = "sluice.engines"
POLICIES = "sluice.policies"
GROUPS = (ENGINES, POLICIES)


class UnusableExtension(ValueError):
    """An extension cannot be used; the message is a sentence with the reason, and what to do."""


@dataclass(frozen=True)
class Extension:
    """What an installed package adds under a name.

    Attributes:
        target: `package.module:attribute`.
        distribution: the package that registers it, as pip names it.
    """

    group: str
    name: str
    target: str
    distribution: str
    version: str

    def load(self) -> Any:
        """Imports and returns the target; raises UnusableExtension, whatever its code raises."""
        module, _, attribute = self.target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            reason = f"the module {error.name} is not installed; run: pip install {self.distribution}"
        except (Exception, SystemExit) as error:
            text = sentence(str(error), MAX_MESSAGE_LENGTH).rstrip(".")
            reason = f"importing it raised {type(error).__name__}: {text}"
        raise UnusableExtension(f"Extension {self.name} of {self.distribution} cannot be loaded: {reason}.")


def installed(group: str) -> list[Extension]:
    """Returns every extension of a group, by name; one name may be there several times."""
    return sorted(map(_extension, entry_points(group=group)), key=lambda extension: (extension.name, extension.target))


def installed_names(group: str) -> set[str]:
    """Returns the names that extensions of a group have."""
    return {point.name for point in entry_points(group=group)}


def find_extension(group: str, name: str) -> Extension | None:
    """Returns the extension that has a name; None if none has.

    Raises:
        UnusableExtension: several packages register the name.
    """
    same = [extension for extension in installed(group) if extension.name == name]
    if not same:
        return None
    if conflict := conflict_of(same[0], same):
        raise UnusableExtension(conflict)
    return same[0]


def conflict_of(extension: Extension, same: Sequence[Extension], built_in: Collection[str] = ()) -> str:
    """Returns why an extension's name is not its own, as a sentence; empty if it is.

    Args:
        same: all extensions of that group and name.
        built_in: names that no extension may have.
    """
    if extension.name in built_in:
        name, owner = extension.name, extension.distribution
        return f"Extension {name} of {owner} is not used: the suite has a built-in {name}."
    if len({other.target for other in same}) > 1:
        owners = " and ".join(sorted({other.distribution for other in same}))
        return f"Extension {extension.name} is registered {len(same)} times, by {owners}: uninstall all but one."
    return ""


def _extension(point: EntryPoint) -> Extension:
    owner = point.dist
    return Extension(
        point.group, point.name, point.value, owner.name if owner else "unknown", owner.version if owner else ""
    )
