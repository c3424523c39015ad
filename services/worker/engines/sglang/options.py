"""Converts the worker's settings into SGLang's command line, without importing SGLang."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.base.errors import invalid
from services.worker.engines.shared.arguments import check_names, parse_engine_args
from services.worker.settings import WorkerSettings

_CPU_OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "mm_attention_backend": "sdpa",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "lora_backend": "torch_native",
}
_UNSUPPORTED = {
    "tokenizer_worker_num": "a worker has one tokenizer process; start more workers instead",
    "detokenizer_worker_num": "the postprocess service detokenizes; start more of its replicas instead",
    "kv_events_config": "the worker configures the events that it forwards to the routers",
}


@dataclass(frozen=True, slots=True)
class Flags:
    """The options of SGLang's parser.

    Attributes:
        names: All option names, with underscores.
        negatable: Names of the options with a `--no-` form.
    """

    names: Collection[str]
    negatable: Collection[str]


def command_line(settings: WorkerSettings, model_path: str, flags: Flags, gpu: bool) -> list[str]:
    """Returns arguments for SGLang's parser: the worker's settings, then --engine-args, then the flags after `--`.

    Args:
        model_path: Folder or hub id.
        gpu: Whether torch has a usable GPU.

    Raises:
        SluiceError: INVALID_ARGUMENT for options that SGLang or this worker does not support.
    """
    given = parse_engine_args(settings.engine_args)
    check_names(given, flags.names, "sglang")
    given_flags = {flag.partition("=")[0].lstrip("-").replace("-", "_") for flag in settings.engine_flags}
    for name, reason in _UNSUPPORTED.items():
        if name in given or name in given_flags:
            raise invalid(f"SGLang's option {name!r} is not supported: {reason}.", param="engine_args")
    options = {**_from_settings(settings, model_path, gpu), **given}
    return [*_argv(options, flags.negatable), *settings.engine_flags]


def _from_settings(settings: WorkerSettings, model_path: str, gpu: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model_path": model_path,
        "served_model_name": settings.spec.name,
        "host": "127.0.0.1",
        "incremental_streaming_output": True,
        "page_size": settings.block_size,
        "max_queued_requests": settings.max_waiting,
        "enable_priority_scheduling": settings.role == "aggregated",
        "schedule_low_priority_values_first": settings.role == "aggregated",
        "enable_metrics": bool(settings.metrics_listen),
        "log_level": "warning",
    }
    if settings.role != "aggregated":
        options["disaggregation_mode"] = settings.role
    if settings.context_length:
        options["context_length"] = settings.context_length
    sizes = {
        "max_total_tokens": ("total_blocks", settings.total_blocks * settings.block_size),
        "max_running_requests": ("max_sequences", settings.max_sequences),
        "chunked_prefill_size": ("max_batched_tokens", settings.max_batched_tokens),
    }
    # With a GPU SGLang measures the available memory; on a CPU it would use most of the machine's.
    options |= {
        name: value for name, (setting, value) in sizes.items() if not gpu or setting in settings.model_fields_set
    }
    if adapters := [adapter for adapter in settings.adapters if "=" in adapter]:
        options["lora_paths"] = adapters
    return options if gpu else {**options, **_CPU_OPTIONS}


def _argv(options: Mapping[str, Any], negatable: Collection[str]) -> list[str]:
    argv: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            argv.append(flag)
        elif value is False:
            argv += ["--no-" + flag[2:]] if name in negatable else []
        elif isinstance(value, list):
            argv += [flag, *(_text(item) for item in value)]
        elif value is not None:
            argv += [flag, _text(value)]
    return argv


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, Mapping | Sequence) and not isinstance(value, str) else str(value)
