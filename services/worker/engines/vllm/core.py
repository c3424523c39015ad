"""Entry point of vLLM's engine process, which records why a start failed."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.worker.engines.shared.crash_reason import CrashReason

_CRASH_FILE = "SLUICE_VLLM_LAST_WORDS"
"""Environment variable with the path of the crash reason file."""
_original: Callable[..., None] | None = None


@contextmanager
def recording_crashes() -> Iterator[Path]:
    """Yields the path to which an engine process started in this context writes its crash reason."""
    global _original
    from vllm.v1.engine.core import EngineCoreProc

    with tempfile.TemporaryDirectory(prefix="sluice-vllm-") as folder:
        path = Path(folder, "last-words")
        os.environ[_CRASH_FILE] = str(path)
        _original = EngineCoreProc.run_engine_core
        EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
        try:
            yield path
        finally:
            EngineCoreProc.run_engine_core = staticmethod(_original)
            del os.environ[_CRASH_FILE]


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Runs vLLM's engine process with crash reporting.

    A forked process inherits the patched class, so vLLM's original function comes from `_original`.
    """
    from vllm.v1.engine.core import EngineCoreProc

    logger = logging.getLogger("vllm.v1.engine.core")
    logger.addFilter(CrashReason(Path(os.environ[_CRASH_FILE]), "EngineCore failed to start"))
    try:
        (_original or EngineCoreProc.run_engine_core)(*args, **kwargs)
    except Exception:
        sys.exit(1)  # vLLM has logged the error
