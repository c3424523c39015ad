"""From the worker's settings to vLLM's own command line: every flag of vLLM's engine is accepted as vLLM knows it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from services.common.errors import invalid
from services.worker.engines.shared.arguments import parse_engine_args
from services.worker.settings import WorkerSettings

_OF_SETTINGS = {
    "context_length": "max_model_len",
    "block_size": "block_size",
    "total_blocks": "num_gpu_blocks_override",
    "max_sequences": "max_num_seqs",
    "max_batched_tokens": "max_num_batched_tokens",
}
"""Settings of the worker and what vLLM calls them; those that nobody set are vLLM's to choose."""


def command_line(settings: WorkerSettings, model: str, given: Mapping[str, Any] | None = None) -> list[str]:
    """Flags for vLLM's parser: the worker's settings, then --engine-args, then what followed `--`; --model is first.

    Args:
        model: folder or hub id.
        given: options of vLLM instead of those in --engine-args.

    Raises:
        SluiceError: INVALID_ARGUMENT when --engine-args is not readable, or names the model.
    """
    if given is None:
        given = parse_engine_args(settings.engine_args)
    for name in ("model", "served_model_name"):
        if name in given or any(_names(flag, name) for flag in settings.engine_flags):
            raise invalid(f"vLLM's option {name} is the worker's --model.", param="engine_args")
    own: dict[str, Any] = {"model": model, "served_model_name": settings.spec.name}
    for setting, option in _OF_SETTINGS.items():
        value = getattr(settings, setting)
        if setting in settings.model_fields_set and value:
            own[option] = value
    if settings.adapters:
        own["enable_lora"] = True
    return [*flags({**own, **given}), *settings.engine_flags]


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options as flags: true and false become --name and --no-name, null is left out, objects and lists are JSON."""
    line: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            line.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
            line += [f"--{flag}", *(str(item) for item in value)]
        else:
            line += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return line


def named_adapters(adapters: Iterable[str]) -> dict[str, str]:
    """`NAME=FOLDER` of --adapters; a folder alone is named by its last part.

    Raises:
        SluiceError: INVALID_ARGUMENT when a folder is not there, or a name is used twice.
    """
    found: dict[str, str] = {}
    for text in adapters:
        name, _, folder = text.rpartition("=")
        path = Path(folder).expanduser()
        name = name or path.name
        if not path.is_dir():
            raise invalid(f"LoRA adapter {name!r}: {folder} is no folder.", param="adapters", code="adapter_unusable")
        if name in found:
            raise invalid(f"LoRA adapter {name!r} is named twice.", param="adapters")
        found[name] = str(path.resolve())
    return found


def kv_events_config(folder: str, data_parallel_size: int) -> dict[str, Any]:
    """Where the engine publishes its KV events unless the user says so: in a private folder, or on loopback ports.

    vLLM gives only TCP endpoints a place per data-parallel rank.
    """
    ranks_apart = data_parallel_size > 1
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:0" if ranks_apart else f"ipc://{folder}/events",
        "replay_endpoint": "tcp://*:0" if ranks_apart else f"ipc://{folder}/replay",
    }


def _names(flag: str, option: str) -> bool:
    return flag.startswith("--") and flag[2:].partition("=")[0].replace("-", "_") == option
