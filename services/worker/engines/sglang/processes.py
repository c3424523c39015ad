"""What runs in SGLang's own processes; a spawned one imports this first, and anything of SGLang after it."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from services.worker.engines.sglang import import_stubs as stand_ins
from services.worker.engines.shared.crash_reason import CrashReason

RENDEZVOUS = "SLUICE_SGLANG_RENDEZVOUS"
"""Environment variable: the folder where this engine's processes find each other."""
LAST_WORDS = "last-words"
"""File in that folder: why a scheduler ended."""


def run_scheduler(server_args: Any, port_args: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler, whose tokens go straight to the worker.

    It keeps its tokenizer, without which it knows neither grammars nor the least number of tokens, and skips the
    detokenizer: text is made elsewhere.
    """
    from sglang.srt.managers.scheduler import run_scheduler_process

    # The worker drains on these signals, and a terminal sends them to the whole group.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    folder = Path(os.environ[RENDEZVOUS])
    if server_args.nnodes == 1:
        _meet_in_a_file(folder)
    if server_args.enable_lora or server_args.lora_paths:
        stand_ins.forgo_pinned_memory()
    if server_args.log_level != "debug":
        logging.getLogger("sglang.srt.managers.scheduler").addFilter(
            CrashReason(folder / LAST_WORDS, "Scheduler hit an exception")
        )
    port_args.detokenizer_ipc_name = port_args.tokenizer_ipc_name
    run_scheduler_process(server_args, port_args, *args, **kwargs)


def _meet_in_a_file(folder: Path) -> None:
    """The schedulers of one machine find each other through a file: torch's TCP store listens on every interface."""
    import torch.distributed

    join = torch.distributed.init_process_group

    def join_by_file(*args: Any, **kwargs: Any) -> None:
        method = urlsplit(kwargs.get("init_method") or "")
        if method.scheme == "tcp":
            kwargs["init_method"] = f"file://{folder}/{method.port}"
        join(*args, **kwargs)

    torch.distributed.init_process_group = join_by_file


stand_ins.install()
