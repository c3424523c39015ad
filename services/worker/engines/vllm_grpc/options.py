"""Options of the vllm-grpc engine: the address of a running server, or how to start one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from services.common.base.errors import invalid, quoted
from services.common.net.addresses import is_reachable
from services.worker.engines.shared.arguments import parse_engine_args
from services.worker.engines.vllm.options import command_line
from services.worker.settings import WorkerSettings

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The address of a server, or how to start one.

    Attributes:
        address: host:port of a running server; empty: start one.
        program: Path of the `vllm` program; empty: the one of this environment.
        start_s: Timeout in seconds for the server to become healthy.
        silent_s: Seconds without a token and without an answer to the probe after which a server counts as stopped.
        flags: Flags for `vllm serve MODEL --grpc`.
    """

    address: str
    program: str
    start_s: float
    silent_s: float
    flags: tuple[str, ...]

    @property
    def profiles(self) -> bool:
        """Whether the server is started with a profiler."""
        return _sets(self.flags, "--profiler-config")


def read_server_options(settings: WorkerSettings, model: str) -> ServerOptions:
    """Parses --engine-args; raises SluiceError(INVALID_ARGUMENT) for conflicting options."""
    given = parse_engine_args(settings.engine_args)
    address, program = str(given.pop("address", "") or ""), str(given.pop("program", "") or "")
    start_s, silent_s = _seconds(given, "start_s", 600.0), _seconds(given, "silent_s", 8.0)
    if address and not is_reachable(address):
        raise invalid(
            f"The option address of the vllm-grpc engine is {quoted(address)}, expected host:port.", param="engine_args"
        )
    if address and (given or settings.engine_flags or program):
        raise invalid(
            "The option address cannot be combined with options of vLLM, which a running server ignores; set only one.",
            param="engine_args",
        )
    if settings.adapters:
        raise invalid("vLLM's gRPC server does not support LoRA adapters; use the engine vllm.", param="adapters")
    flags = () if address else tuple(command_line(settings, model, given))
    return ServerOptions(address, program, start_s, silent_s, flags)


def _seconds(given: dict[str, Any], name: str, default: float) -> float:
    value = given.pop(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise invalid(
            f"Option {name!r} of the vllm-grpc engine must be a positive number of seconds.", param="engine_args"
        )
    return float(value)


def serve_command(program: str, flags: tuple[str, ...], port: int, events: dict[str, Any]) -> list[str]:
    """Returns the `vllm serve` command for one model on loopback; flags override the default KV events."""
    model, rest = flags[1], list(flags[2:])
    command = [program, "serve", model, "--grpc", "--host", LOOPBACK, "--port", str(port), *rest]
    if not _sets(rest, "--kv-events-config"):
        command += ["--kv-events-config", json.dumps(events)]
    return command


def _sets(flags: Iterable[str], option: str) -> bool:
    return any(flag.partition("=")[0].partition(".")[0] == option for flag in flags)
