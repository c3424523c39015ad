"""`sluice worker`: one worker in this process, with the flags of `python -m services.worker`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from services.common.runner import run
from services.worker.__main__ import serve
from services.worker.settings import WorkerSettings
from sluice.cli.up import tls as tls_flags
from sluice.cli.up.phases import shown
from sluice.cli.up.plan import BadFlag

FLAG = "--tls"


def _with_tls(arguments: Sequence[str]) -> list[str]:
    """The arguments with the service's own TLS flags where --tls DIR stood; BadFlag for a folder without a set."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, engines = list(arguments[:end]), list(arguments[end:])
    given: list[str] = []
    words = iter(own)
    for word in words:
        name, equals, value = word.partition("=")
        if name != FLAG:
            given.append(word)
            continue
        folder = Path(value if equals else next(words, ""))
        if not (folder / "worker.pem").is_file():
            raise BadFlag(f"--tls {folder} holds no worker.pem; `sluice certs {folder}` makes a set")
        given += tls_flags.flags("worker", folder)
    return [*given, *engines]


def run_worker(arguments: Sequence[str]) -> None:
    """Serves until told to stop; does not return."""
    settings = WorkerSettings.load(_with_tls(arguments))
    with shown(sys.stderr.isatty() and settings.log_format == "text"):
        run("worker", settings, lambda stop: serve(settings, stop))
