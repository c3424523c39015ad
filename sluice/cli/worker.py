"""`sluice worker`: one worker in this process, with the flags of `python -m services.worker`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from services.common.runner import run
from services.worker.__main__ import serve
from services.worker.settings import WorkerSettings
from sluice.cli.phases import shown


def run_worker(arguments: Sequence[str]) -> None:
    """Serves until told to stop; does not return."""
    settings = WorkerSettings.load(list(arguments))
    with shown(sys.stderr.isatty() and settings.log_format == "text"):
        run("worker", settings, lambda stop: serve(settings, stop))
