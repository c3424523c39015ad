"""What runs in vLLM's engine process, which imports this first: vLLM's own code, and one line when it cannot start."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.worker.engines.shared import crash_reason

_LAST_WORDS = "SLUICE_VLLM_LAST_WORDS"
"""Environment variable: the file for what the engine process says at last."""
_theirs: Callable[..., None] | None = None


@contextmanager
def speaking() -> Iterator[Path]:
    """While it lasts, a new engine process that fails writes why into the file that this gives."""
    global _theirs
    from vllm.v1.engine.core import EngineCoreProc

    with tempfile.TemporaryDirectory(prefix="sluice-vllm-") as folder:
        path = Path(folder, "last-words")
        os.environ[_LAST_WORDS] = str(path)
        _theirs = EngineCoreProc.run_engine_core
        EngineCoreProc.run_engine_core = staticmethod(run_engine_core)
        try:
            yield path
        finally:
            EngineCoreProc.run_engine_core = staticmethod(_theirs)
            del os.environ[_LAST_WORDS]


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """In the engine's process. Where that was forked, vLLM's own function is the one remembered there."""
    from vllm.v1.engine.core import EngineCoreProc

    own = logging.getLogger("vllm.v1.engine.core")
    own.addFilter(crash_reason.CrashReason(Path(os.environ[_LAST_WORDS]), "EngineCore failed to start"))
    try:
        (_theirs or EngineCoreProc.run_engine_core)(*args, **kwargs)
    except Exception:
        sys.exit(1)  # logged already, with all there is to say
