"""Where chat templates run: in this process, or in one with limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from services.preprocess.templates import templates


class TemplateRunner(Protocol):
    """Runs the templates of one origin. Called from several threads at once.

    Attributes:
        apart: they run in another process, so that `compile` and `render` wait and must stay off the event loop.
    """

    apart: bool

    def compile(self, source: str) -> None:
        """Checks that a template can be compiled; SluiceError as `templates.compiled`."""
        ...

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """Runs a template; SluiceError as `templates.render`."""
        ...

    def prepare(self, source: str, variables: dict[str, Any]) -> Callable[[], Awaitable[str]]:
        """`render` for an event loop: what it returns is called and awaited there. Only where templates run apart."""
        ...

    def close(self) -> None:
        """Ends what it runs in, where that belongs to these templates alone."""
        ...


class InThisProcess(TemplateRunner):
    """For templates that the operator installed.

    Args:
        limit_s: longest that one may run, seconds.
        max_chars: longest result of one.
    """

    apart = False

    def __init__(self, limit_s: float, max_chars: int) -> None:
        self._limit_s = limit_s
        self._max_chars = max_chars

    def compile(self, source: str) -> None:
        """See TemplateRunner."""
        templates.compiled(source)

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """See TemplateRunner."""
        return templates.render(source, variables, self._limit_s, self._max_chars)

    def prepare(self, source: str, variables: dict[str, Any]) -> Callable[[], Awaitable[str]]:
        """See TemplateRunner."""
        raise NotImplementedError("Templates of this process are rendered at once.")

    def close(self) -> None:
        """See TemplateRunner."""
