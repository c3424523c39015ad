"""How the engine vllm-grpc is started: against a running server, or with one of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from services.common.errors import invalid
from services.worker.engines.shared.arguments import parse_engine_args
from services.worker.engines.vllm.options import command_line
from services.worker.settings import WorkerSettings

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server is, or how to start it.

    Attributes:
        address: host:port of a running server; empty: start one.
        program: the `vllm` to run; empty: the one of this environment.
        start_s: seconds that the server may take to answer.
        flags: for `vllm serve MODEL --grpc`.
    """

    address: str
    program: str
    start_s: float
    flags: tuple[str, ...]

    @property
    def profiles(self) -> bool:
        """The server gets a profiler."""
        return _names(self.flags, "--profiler-config")


def read_server_options(settings: WorkerSettings, model: str) -> ServerOptions:
    """SluiceError(INVALID_ARGUMENT) when the options contradict each other."""
    given = parse_engine_args(settings.engine_args)
    address, program = str(given.pop("address", "") or ""), str(given.pop("program", "") or "")
    start_s = given.pop("start_s", 600)
    if isinstance(start_s, bool) or not isinstance(start_s, int | float) or start_s <= 0:
        raise invalid("Option 'start_s' of the vllm-grpc engine is a number of seconds.", param="engine_args")
    if address and (given or settings.engine_flags or program):
        raise invalid(
            "A server that runs already keeps the options it was started with: give either address or options of vLLM.",
            param="engine_args",
        )
    if settings.adapters:
        raise invalid("vLLM's gRPC server cannot choose LoRA adapters; use the engine vllm.", param="adapters")
    flags = () if address else tuple(command_line(settings, model, given))
    return ServerOptions(address, program, float(start_s), flags)


def serve_command(program: str, flags: tuple[str, ...], port: int, events: dict[str, Any]) -> list[str]:
    """`vllm serve` for one model on loopback; with KV events unless the flags have their own."""
    model, rest = flags[1], list(flags[2:])
    command = [program, "serve", model, "--grpc", "--host", LOOPBACK, "--port", str(port), *rest]
    if not _names(rest, "--kv-events-config"):
        command += ["--kv-events-config", json.dumps(events)]
    return command


def _names(flags: Iterable[str], option: str) -> bool:
    return any(flag.partition("=")[0].partition(".")[0] == option for flag in flags)
