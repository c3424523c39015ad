"""TLS from files that may be replaced: every new connection uses their current content."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

Files = Sequence[str | PathLike[str]]


class RenewingContext(ssl.SSLContext):
    """A client's context; while files cannot be read or do not match, the previous content stays in use.

    Args:
        files: files whose change is detected.
        make: reads them; raises OSError if one is missing or does not match.
    """

    _files: Files
    _make: Callable[[], ssl.SSLContext]
    _current: ssl.SSLContext
    _state: object

    def __new__(cls, files: Files, make: Callable[[], ssl.SSLContext]) -> RenewingContext:
        context = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        context._files, context._make = files, make
        context._state, context._current = _state_of(files), make()
        return context

    def wrap_bio(self, *args: Any, **more: Any) -> ssl.SSLObject:
        state = _state_of(self._files)
        if state != self._state:
            try:
                self._current, self._state = self._make(), state
            except OSError:
                pass
        return self._current.wrap_bio(*args, **more)


def _state_of(files: Files) -> object:
    try:
        stats = [os.stat(file) for file in files]
    except OSError:
        return None
    return [(one.st_mtime_ns, one.st_size, one.st_ino) for one in stats]
