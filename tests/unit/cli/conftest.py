"""Runs the command line in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from sluice.cli.main import main

Sluice = Callable[..., int]
"""Runs `sluice` with arguments and returns its exit code."""


@pytest.fixture
def sluice(monkeypatch: pytest.MonkeyPatch) -> Sluice:
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["sluice", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return run
