"""One suite for the tests that attack it, and the honest clients that must not notice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.servers.suite import Suite


@pytest.fixture(scope="module")
def attacked() -> Iterator[Suite]:
    """A suite of a module's own, whose processes must all outlive the attacks."""
    with Suite("--speedup", "2") as running:
        before = {process.pid for process in running.processes()}
        yield running
        alive = {process.pid for process in running.processes()}
        assert alive == before, "a process of the suite ended"
