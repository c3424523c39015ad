"""One running suite for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.servers.suite import Suite


@pytest.fixture(scope="session")
def suite() -> Iterator[Suite]:
    """Two mock workers, the default model, memory store."""
    with Suite("--speedup", "20") as running:
        yield running
