"""Finds the extensions of the suite: entry points of the groups `sluice.*`, one name each.

An extension is a folder of the suite or an installed package. The suite's own are registered in pyproject.toml as those
of other packages are, so that the kernel imports none of them; an extra in brackets, as in
`name = "module:attribute [extra]"`, has the packages that the extension needs.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import Any

import services
from services.common.base.errors import MAX_MESSAGE_LENGTH, sentence

APIS = "sluice.apis"
COMMANDS = "sluice.commands"
ENGINES = "sluice.engines"
ENGINE_LISTS = "sluice.engine_lists"
PARSER_HOSTS = "sluice.parser_hosts"
POLICIES = "sluice.policies"
PROCESSING = "sluice.processing"
ROUTER_SERVERS = "sluice.router_servers"
TOKENIZERS = "sluice.tokenizers"
MEDIA = "sluice.media"
OBSERVERS = "sluice.observers"
GROUPS = (
    APIS,
    COMMANDS,
    ENGINES,
    ENGINE_LISTS,
    MEDIA,
    OBSERVERS,
    PARSER_HOSTS,
    POLICIES,
    PROCESSING,
    ROUTER_SERVERS,
    TOKENIZERS,
)

OWN = "sluice-llm"
"""The distribution of the suite, whose names no other package may take."""


class UnusableExtension(ValueError):
    """An extension cannot be used; the message is a sentence with the reason, and what to do."""


@dataclass(frozen=True)
class Extension:
    """What a package adds under a name.

    Attributes:
        target: `package.module:attribute`.
        distribution: the package that registers it, as pip names it.
        extra: the extra of the distribution that has what the extension needs; empty: it needs nothing more.
    """

    group: str
    name: str
    target: str
    distribution: str
    version: str
    extra: str = ""

    @property
    def is_own(self) -> bool:
        """Whether it is part of the suite itself."""
        return self.distribution == OWN

    @property
    def install_command(self) -> str:
        """The command that installs the extension with all that it needs."""
        return f'pip install "{self.distribution}[{self.extra}]"' if self.extra else f"pip install {self.distribution}"

    def load(self) -> Any:
        """Imports and returns the target; raises UnusableExtension, whatever its code raises."""
        module, _, attribute = self.target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            reason = f"the module {error.name} is not installed; run: {self.install_command}"
        except (Exception, SystemExit) as error:
            text = sentence(str(error), MAX_MESSAGE_LENGTH).rstrip(".")
            reason = f"importing it raised {type(error).__name__}: {text}"
        raise UnusableExtension(f"Extension {self.name} of {self.distribution} cannot be loaded: {reason}.")

    def problem(self) -> str:
        """Returns why it cannot be used, as far as that shows without importing it; empty if it can."""
        missing = self.missing_packages()
        if not missing and not _has_module(self.target.partition(":")[0]):
            missing = [self.target.partition(":")[0]]
        if not missing:
            return ""
        reason = f"{' and '.join(missing)} not installed; run: {self.install_command}"
        return f"Extension {self.name} of {self.distribution} cannot be used: {reason}."

    def missing_packages(self) -> list[str]:
        """Returns the packages of its extra that are not installed, as pip names them."""
        return [name for name in _required(self.distribution, self.extra) if not _is_installed(name)]


@dataclass(frozen=True)
class ExtensionGroup:
    """The extensions of a group.

    Attributes:
        usable: what each adds, by name.
        missing: why each of the others cannot be used, by name, as a sentence.
    """

    usable: Mapping[str, Any] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


def installed(group: str) -> list[Extension]:
    """Returns every extension of a group, by name; one name may be there several times."""
    return sorted(_extensions(group), key=lambda extension: (extension.name, extension.target))


def installed_names(group: str) -> set[str]:
    """Returns the names that extensions of a group have."""
    return {extension.name for extension in _extensions(group)}


def find_extension(group: str, name: str) -> Extension | None:
    """Returns the extension that has a name; None if none has.

    Raises:
        UnusableExtension: several packages register the name.
    """
    same = [extension for extension in installed(group) if extension.name == name]
    if not same:
        return None
    first = next((extension for extension in same if extension.is_own), same[0])
    if conflict := conflict_of(first, same):
        raise UnusableExtension(conflict)
    return first


def problem_of(group: str, name: str) -> str:
    """Returns why the extension of a name cannot be used, as far as that shows without an import; empty if it can."""
    try:
        extension = find_extension(group, name)
    except UnusableExtension as error:
        return str(error)
    return f"The extension {name} is not installed." if extension is None else extension.problem()


def load_extension(group: str, name: str, missing: str) -> Any:
    """Returns what an extension adds.

    Args:
        missing: the sentence of the error if it is not installed.

    Raises:
        UnusableExtension: it is not installed, or cannot be used.
    """
    extension = find_extension(group, name)
    if extension is None:
        raise UnusableExtension(missing)
    return extension.load()


def load_group(group: str, report: Callable[[str], None]) -> ExtensionGroup:
    """Imports the extensions of a group, of which those that cannot be used are missing.

    Args:
        report: called with a sentence for each of these.
    """
    usable: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name in sorted(installed_names(group)):
        try:
            extension = find_extension(group, name)
            if extension is not None:
                usable[name] = extension.load()
        except UnusableExtension as error:
            missing[name] = str(error)
            report(str(error))
    return ExtensionGroup(usable, missing)


def conflict_of(extension: Extension, same: Sequence[Extension], built_in: Collection[str] = ()) -> str:
    """Returns why an extension's name is not its own, as a sentence; empty if it is.

    Args:
        same: all extensions of that group and name.
        built_in: names that no extension may have.
    """
    if extension.is_own:
        return ""
    if extension.name in built_in or any(other.is_own for other in same):
        name, owner = extension.name, extension.distribution
        return f"Extension {name} of {owner} is not used: the suite has a built-in {name}."
    if len({other.target for other in same}) > 1:
        owners = " and ".join(sorted({other.distribution for other in same}))
        return f"Extension {extension.name} is registered {len(same)} times, by {owners}: uninstall all but one."
    return ""


def _extensions(group: str) -> list[Extension]:
    """Returns the extensions of a group; the suite's own by the pyproject.toml of a checkout, installed or not."""
    checkout = _checkout()
    found = [
        _extension(point, owner.name if (owner := point.dist) else "unknown", owner.version if owner else "")
        for point in entry_points(group=group)
    ]
    if not checkout:
        return found
    own = checkout.get("entry-points", {}).get(group, {})
    return [extension for extension in found if not extension.is_own] + [
        _extension(EntryPoint(name, value, group), OWN, checkout["version"]) for name, value in own.items()
    ]


def _extension(point: EntryPoint, distribution: str, release: str) -> Extension:
    target, _, extra = point.value.partition("[")
    return Extension(point.group, point.name, target.strip(), distribution, release, extra.strip("] "))


@cache
def _checkout() -> Mapping[str, Any]:
    """Returns the table `project` of the pyproject.toml beside the running code; empty where it is installed."""
    file = Path(services.__file__).parents[1] / "pyproject.toml"
    if not file.is_file():
        return {}
    project: Mapping[str, Any] = tomllib.loads(file.read_text("utf-8")).get("project", {})
    return project if project.get("name") == OWN else {}


def _required(distribution: str, extra: str) -> list[str]:
    """Returns the names of the packages of an extra."""
    if not extra:
        return []
    if distribution == OWN and (checkout := _checkout()):
        texts = checkout["optional-dependencies"][extra]
    else:
        marked = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
        texts = [text for text in requires(distribution) or () if marked.search(text)]
    return [name[0] for text in texts if (name := re.match(r"[\w.-]+", text))]


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
