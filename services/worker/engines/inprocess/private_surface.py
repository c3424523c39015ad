"""Checks at the start that an engine has the private parts that its adapter uses."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection, Iterable
from functools import reduce

from services.common.base.errors import ErrorKind, SluiceError

log = logging.getLogger(__name__)


def check(engine: str, version: str, tested: Collection[str], parts: Iterable[str]) -> None:
    """Logs a warning for an untested version, and raises when a part is missing.

    Args:
        tested: Versions that the adapter was checked against.
        parts: `module:attribute` of every private part, also of public ones that the adapter replaces.

    Raises:
        SluiceError: FAILED_PRECONDITION; the message contains every missing part.
    """
    expected = " or ".join(sorted(tested))
    if version.partition("+")[0] not in tested:
        log.warning("untested engine version", extra={"engine": engine, "version": version, "tested": expected})
    if missing := [part for part in parts if not _exists(part)]:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"{engine} {version} lacks {', '.join(missing)}, which this worker uses; install {engine} {expected}.",
            param="engine",
        )


def _exists(part: str) -> bool:
    module, _, attributes = part.partition(":")
    try:
        reduce(getattr, attributes.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return True
