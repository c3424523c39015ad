"""The error that ends a command with one sentence and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class BadFlag(Exception):
    """Raised if a command cannot run as it was called; the message is one sentence with advice."""


@contextmanager
def needs_extra(command: str, extra: str) -> Iterator[None]:
    """Raises BadFlag if an import inside it fails because the packages of an extra are not installed."""
    try:
        yield
    except ImportError as error:
        raise BadFlag(f"{command} needs the package {error.name}: install sluice-llm[{extra}]") from error
