"""Expected errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from services.common.base.errors import SluiceError


@contextmanager
def raises_error(*, match: str | None = None, **fields: Any) -> Iterator[pytest.ExceptionInfo[SluiceError]]:
    """Expects a SluiceError with these attributes."""
    with pytest.raises(SluiceError, match=match) as caught:
        yield caught
    assert {name: getattr(caught.value, name) for name in fields} == fields
