"""The list of running servers that `sluice up --engines` serves instead of own workers; an extension reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from services.common.packages.extensions import ENGINE_LISTS, UnusableExtension, find_extension
from sluice.cli.errors import BadFlag
from sluice.cli.up.plan import ListedEngine, Process
from sluice.cli.up.progress import View

READER = "file"
"""The entry point that reads the file of --engines: a class with the path as its only parameter."""


class FollowedEngines(Protocol):
    """The workers of the listed servers."""

    async def run(self) -> None:
        """Starts and stops workers as the list says, until it is cancelled; then stops all."""

    def kill(self) -> None:
        """Kills the workers that still stop."""


class EngineList(Protocol):
    """A list of running servers."""

    def check(self) -> None:
        """Raises BadFlag if it is invalid."""

    def workers(self, process_of: Callable[[ListedEngine, int], Process], view: View) -> FollowedEngines:
        """Returns the workers of its servers.

        Args:
            process_of: describes the worker of a server, on a port.
        """


def engine_list(file: Path) -> EngineList:
    """Returns the list in a file; raises BadFlag without the extension that reads it."""
    try:
        extension = find_extension(ENGINE_LISTS, READER)
        if extension is None:
            raise BadFlag("--engines needs an extension that is not installed: the folder sluice/cli/up/engines.")
        reader: EngineList = extension.load()(file)
    except UnusableExtension as error:
        raise BadFlag(f"--engines: {error}") from error
    return reader
