"""Converts the worker's settings into vLLM's command line; every flag of vLLM's engine is accepted unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from services.common.base.errors import invalid
from services.worker.engines.shared.arguments import parse_engine_args
from services.worker.settings import WorkerSettings

_FROM_SETTINGS = {
    "context_length": "max_model_len",
    "block_size": "block_size",
    "total_blocks": "num_gpu_blocks_override",
    "max_sequences": "max_num_seqs",
    "max_batched_tokens": "max_num_batched_tokens",
}
"""Worker settings by vLLM option; vLLM chooses the options whose setting is not set."""


def command_line(settings: WorkerSettings, model: str, given: Mapping[str, Any] | None = None) -> list[str]:
    """Returns flags for vLLM's parser: the worker's settings, then --engine-args, then the flags after `--`.

    Args:
        model: Folder or hub id; the first flag.
        given: vLLM options that replace those of --engine-args.

    Raises:
        SluiceError: INVALID_ARGUMENT when --engine-args is invalid or sets the model.
    """
    if given is None:
        given = parse_engine_args(settings.engine_args)
    for name in ("model", "served_model_name"):
        if name in given or any(_sets(flag, name) for flag in settings.engine_flags):
            raise invalid(f"vLLM's option {name} is set by the worker; use --model instead.", param="engine_args")
    options: dict[str, Any] = {"model": model, "served_model_name": settings.spec.name}
    for setting, option in _FROM_SETTINGS.items():
        value = getattr(settings, setting)
        if setting in settings.model_fields_set and value:
            options[option] = value
    if settings.adapters:
        options["enable_lora"] = True
    return [*flags({**options, **given}), *settings.engine_flags]


def flags(options: Mapping[str, Any]) -> list[str]:
    """Returns options as flags: booleans as --name or --no-name, null omitted, objects and nested lists as JSON."""
    argv: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
            argv += [f"--{flag}", *(str(item) for item in value)]
        else:
            argv += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return argv


def named_adapters(adapters: Iterable[str]) -> dict[str, str]:
    """Parses the `NAME=FOLDER` values of --adapters; a folder without a name uses its last component.

    Raises:
        SluiceError: INVALID_ARGUMENT when a folder does not exist or a name is used twice.
    """
    named: dict[str, str] = {}
    for text in adapters:
        name, _, folder = text.rpartition("=")
        path = Path(folder).expanduser()
        name = name or path.name
        if not path.is_dir():
            raise invalid(
                f"LoRA adapter {name!r}: {folder} is not a folder.", param="adapters", code="adapter_unusable"
            )
        if name in named:
            raise invalid(f"LoRA adapter {name!r} is defined twice; use distinct names.", param="adapters")
        named[name] = str(path.resolve())
    return named


def kv_events_config(folder: str, data_parallel_size: int) -> dict[str, Any]:
    """Returns vLLM's default kv_events_config: sockets in a private folder, or TCP ports with several ranks.

    vLLM derives an endpoint per data-parallel rank from TCP endpoints only.
    """
    use_tcp = data_parallel_size > 1
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:0" if use_tcp else f"ipc://{folder}/events",
        "replay_endpoint": "tcp://*:0" if use_tcp else f"ipc://{folder}/replay",
    }


def _sets(flag: str, option: str) -> bool:
    return flag.startswith("--") and flag[2:].partition("=")[0].replace("-", "_") == option
