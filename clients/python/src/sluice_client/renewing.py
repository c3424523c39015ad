"""TLS from files that may be replaced: every new connection takes them as they are then."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

Files = Sequence[str | PathLike[str]]


class RenewingContext(ssl.SSLContext):
    """A client's context; files that cannot be read, or that do not fit together yet, leave what was read before.

    Args:
        files: whose change matters.
        make: reads them; OSError when one is missing or does not fit.
    """

    _files: Files
    _make: Callable[[], ssl.SSLContext]
    _current: ssl.SSLContext
    _state: object

    def __new__(cls, files: Files, make: Callable[[], ssl.SSLContext]) -> RenewingContext:
        context = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        context._files, context._make = files, make
        context._state, context._current = _look(files), make()
        return context

    def wrap_bio(self, *args: Any, **more: Any) -> ssl.SSLObject:
        state = _look(self._files)
        if state != self._state:
            try:
                self._current, self._state = self._make(), state
            except OSError:
                pass
        return self._current.wrap_bio(*args, **more)


def _look(files: Files) -> object:
    try:
        found = [os.stat(file) for file in files]
    except OSError:
        return None
    return [(one.st_mtime_ns, one.st_size, one.st_ino) for one in found]
