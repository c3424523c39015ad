"""The model of the mock engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.data.tiny_models import build_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
