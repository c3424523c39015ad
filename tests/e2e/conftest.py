"""One running suite for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.servers.suite import Suite


@pytest.fixture(scope="session")
def classifying_suite() -> Iterator[Suite]:
    """One mock worker whose default model classifies texts."""
    classes = {"SLUICE_WORKER_ENGINE_ARGS": '{"labels": ["good", "bad", "neither"]}'}
    with Suite("--workers", "1", env=classes) as running:
        yield running


@pytest.fixture(scope="module")
def client(suite: Suite) -> Iterator[openai.OpenAI]:
    """The OpenAI client, without retries, connected to `suite`."""
    with openai.OpenAI(base_url=f"{suite.url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made
