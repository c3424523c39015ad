"""Runs chat templates in this process, or in one with limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from services.common.base.errors import SluiceError
from services.preprocess.templates import templates
from services.preprocess.templates.capabilities import TemplateCapabilities
from services.preprocess.templates.templates import RenderedText


class TemplateRunner(Protocol):
    """Runs the templates of one origin; thread-safe.

    Attributes:
        apart: whether they run in another process, so `compile` and `render` block and must stay off the event loop.
    """

    apart: bool

    def compile(self, source: str) -> None:
        """Compiles a template; raises SluiceError as `templates.compiled`."""
        ...

    def render(self, source: str, variables: dict[str, Any], known: TemplateCapabilities | None = None) -> RenderedText:
        """Runs a template; raises SluiceError as `templates.render`."""
        ...

    def prepare(
        self, source: str, variables: dict[str, Any], known: TemplateCapabilities | None = None
    ) -> Callable[[], Awaitable[RenderedText]]:
        """Returns `render` as a coroutine function, for an event loop. Only where templates run apart."""
        ...

    def close(self) -> None:
        """Ends the processes that serve only these templates."""
        ...


class InThisProcess(TemplateRunner):
    """Runs templates installed by the operator.

    Args:
        limit_s: maximum run time, seconds.
        max_chars: maximum length of the output.
    """

    apart = False

    def __init__(self, limit_s: float, max_chars: int) -> None:
        self._limit_s = limit_s
        self._max_chars = max_chars

    def compile(self, source: str) -> None:
        templates.compiled(source)

    def render(self, source: str, variables: dict[str, Any], known: TemplateCapabilities | None = None) -> RenderedText:
        try:
            return templates.render(source, variables, self._limit_s, self._max_chars, known)
        except SluiceError as error:
            if error.param == "chat_template":  # not a field of the client's
                error.param = "messages"
            raise

    def prepare(
        self, source: str, variables: dict[str, Any], known: TemplateCapabilities | None = None
    ) -> Callable[[], Awaitable[RenderedText]]:
        """Raises NotImplementedError: these templates do not run apart."""
        raise NotImplementedError("Templates in this process have no coroutine form; call render.")

    def close(self) -> None:
        """Does nothing."""
