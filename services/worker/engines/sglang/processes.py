"""Entry point of SGLang's scheduler processes; imports nothing of SGLang before the stubs are installed."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from services.worker.engines.sglang import import_stubs
from services.worker.engines.shared.crash_reason import CrashReason

RENDEZVOUS = "SLUICE_SGLANG_RENDEZVOUS"
"""Environment variable with the folder of this engine's rendezvous files."""
CRASH_FILE = "last-words"
"""File in that folder with a scheduler's crash reason."""


def run_scheduler(server_args: Any, port_args: Any, *args: Any, **kwargs: Any) -> None:
    """Runs SGLang's scheduler, which sends its tokens directly to the worker, without SGLang's detokenizer.

    The scheduler keeps its tokenizer, which grammars and the minimum number of tokens require.
    """
    import_stubs.declare_operators()
    from sglang.srt.managers.scheduler import run_scheduler_process

    # The worker drains on these signals, which a terminal sends to the whole process group.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    folder = Path(os.environ[RENDEZVOUS])
    if server_args.nnodes == 1:
        _use_file_rendezvous(folder)
    if server_args.enable_lora or server_args.lora_paths:
        import_stubs.forgo_pinned_memory()
    if server_args.log_level != "debug":
        logging.getLogger("sglang.srt.managers.scheduler").addFilter(
            CrashReason(folder / CRASH_FILE, "Scheduler hit an exception")
        )
    port_args.detokenizer_ipc_name = port_args.tokenizer_ipc_name
    run_scheduler_process(server_args, port_args, *args, **kwargs)


def _use_file_rendezvous(folder: Path) -> None:
    """Makes torch rendezvous through a file, because its TCP store listens on every network interface."""
    import torch.distributed

    init_process_group = torch.distributed.init_process_group

    def init_by_file(*args: Any, **kwargs: Any) -> None:
        method = urlsplit(kwargs.get("init_method") or "")
        if method.scheme == "tcp":
            kwargs["init_method"] = f"file://{folder}/{method.port}"
        init_process_group(*args, **kwargs)

    torch.distributed.init_process_group = init_by_file


import_stubs.install()
