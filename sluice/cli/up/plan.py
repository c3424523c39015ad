"""Turns the flags of `sluice up` into a list of processes with their command lines."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from services.common.base.errors import SluiceError
from services.common.net.addresses import host_port, join
from services.common.packages import model_files as models
from services.common.redis import target
from services.worker.engines import engine_names
from sluice.cli.errors import BadFlag
from sluice.cli.flags import arguments
from sluice.cli.up import tls as tls_flags
from sluice.cli.up.options import LOOPBACK, Options
from sluice.cli.up.pipeline import worker_arguments

DRAIN_S = 2.5
QUIET = "warning"
"""Log level of the services of `sluice up`, which itself reports what starts and stops."""

_ROUTER_OFFSETS = (1, 4, 5, 6, 7, 8, 9)
_WORKER_OFFSET = 10
_PREFILL = "prefill-"
_EXTRA_PREPROCESS_OFFSET = 1000
_EXTRA_POSTPROCESS_OFFSET = 2000
_MAX_PROCESSES = {
    "workers": 990,
    "routers": len(_ROUTER_OFFSETS),
    "preprocess": 1000,
    "postprocess": 1000,
    "gateways": 64,
}
"""Processes that `sluice up` starts of each kind; a larger number is refused."""
_OF_OWN_WORKERS = ("workers", "prefill_workers", "engine", "model", "model_name", "processor", "speedup")
_LISTENER = re.compile(r"SLUICE_[A-Z]+_([A-Z_]+)_LISTEN")
"""Variables of listeners besides a service's own, which --listen sets."""
_SHARED_BY_GATEWAYS = ("SLUICE_GATEWAY_LIMITS_REDIS_URL", "SLUICE_GATEWAY_RESPONSES_REDIS_URL")


@dataclass(frozen=True)
class Process:
    """Describes one process of the suite.

    Attributes:
        health: protocol by which it reports that it is ready.
        env: added to the environment; holds secrets, which must not appear in a process list.
        workers: number of workers that the gateway must be connected to before it is ready.
        tls: folder of its certificates; None for plain text.
        shares_port: whether other processes of its kind listen on the same port.
        python: interpreter that runs it; empty for this one.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    host: str
    port: int
    health: Literal["grpc", "http"] = "grpc"
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    workers: int = 0
    tls: Path | None = None
    shares_port: bool = False
    python: str = ""

    @property
    def address(self) -> str:
        """Its host:port, with brackets around an IPv6 address."""
        return join(self.host, self.port)

    @property
    def kind(self) -> str:
        """The service it runs, such as ``router``."""
        return self.module.rpartition(".")[2]


class ListedEngine(Protocol):
    """One running server."""

    @property
    def name(self) -> str:
        """The id of its worker."""

    def worker_arguments(self) -> tuple[str, ...]:
        """Returns the flags of its worker."""


def check(options: Options) -> models.ModelSpec:
    """Validates the flags and returns the model.

    Raises:
        BadFlag: for the first invalid flag.
    """
    for name, maximum in _MAX_PROCESSES.items():
        minimum = 0 if name == "workers" else 1  # they may be started by other means
        if not minimum <= getattr(options, name) <= maximum:
            raise BadFlag(f"--{name} must be between {minimum} and {maximum}.")
    if not 0 <= options.prefill_workers <= _MAX_PROCESSES["workers"] - options.workers:
        raise BadFlag(f"--prefill-workers must be between 0 and {_MAX_PROCESSES['workers'] - options.workers}.")
    try:
        options.pipeline.check_classes()
    except ValueError as error:
        raise BadFlag(str(error)) from error
    if options.routers > 1 and not options.redis:
        raise BadFlag("--routers above 1 needs --redis, in which routers share their state.")
    if options.redis:
        try:
            target.parse(options.redis, setting="--redis")
        except SluiceError as error:
            raise BadFlag(error.message) from error
    if not options.host:
        raise BadFlag("--host must not be empty; use 0.0.0.0 or :: for every address of this machine.")
    if not 0 <= options.port <= 65535:
        raise BadFlag("--port must be between 0 and 65535.")
    highest = max(_offsets(options).values())
    if options.base_grpc_port < 0 or options.base_grpc_port + highest > 65535:
        raise BadFlag(f"--base-grpc-port must be between 0 and {65535 - highest} for this number of processes.")
    if options.base_grpc_port and options.port - options.base_grpc_port in _offsets(options).values():
        raise BadFlag(
            f"--port {options.port} is one of the ports that --base-grpc-port assigns to the services; choose another."
        )
    if options.engines is not None:
        _check_no_own_workers(options)
    if ":" not in options.engine and options.engine not in engine_names():
        raise BadFlag(f"--engine must be one of {', '.join(engine_names())}, or package.module:Class.")
    if options.speedup is not None and not (math.isfinite(options.speedup) and options.speedup > 0):
        raise BadFlag("--speedup must be a number above 0.")
    if problem := options.processing.problem():
        raise BadFlag(problem)
    if options.tls is not None and (problem := tls_flags.problem(options.tls)):
        raise BadFlag(problem)
    return _model(options)


def _check_no_own_workers(options: Options) -> None:
    """Raises BadFlag for flags of own workers, which would have no effect."""
    for name in _OF_OWN_WORKERS:
        if getattr(options, name) != getattr(Options, name):
            raise BadFlag(f"--engines replaces the suite's own workers; remove --{name.replace('_', '-')}.")


def engine_process(options: Options, entry: ListedEngine, routers: str, port: int) -> Process:
    """Returns the worker of a running server.

    Args:
        routers: addresses of the routers, separated by commas.
    """
    flags = (
        *("--listen", join(LOOPBACK, port), "--routers", routers),
        *entry.worker_arguments(),
        *worker_arguments(options.pipeline.config()),
        *_common("worker", options),
    )
    return Process(entry.name, "services.worker", flags, LOOPBACK, port)


def plan(options: Options, free_port: Callable[[], int]) -> list[Process]:
    """Returns the processes in the order in which they start.

    Args:
        options: the flags; port 0 and base port 0 mean free ports.
        free_port: returns a different free port at each call.

    Raises:
        BadFlag: for an invalid flag, as in `check`.
    """
    model = check(options)
    pipeline = options.pipeline.config()
    base = options.base_grpc_port
    ports = {name: base + offset if base else free_port() for name, offset in _offsets(options).items()}
    secrets = {"SLUICE_ROUTER_REDIS_URL": options.redis} if options.redis else {}

    def grpc_services(module: str, *flags: str, env: Mapping[str, str] | None = None) -> list[Process]:
        return [
            Process(
                name,
                f"services.{module}",
                ("--listen", join(LOOPBACK, ports[name]), *flags, *_common(module, options)),
                LOOPBACK,
                ports[name],
                env={**(env or {}), **_own_listeners(module, index)},
            )
            for index, name in enumerate(_names(module, options))
        ]

    def addresses(module: str) -> str:
        return ",".join(join(LOOPBACK, ports[name]) for name in _names(module, options))

    workers = [
        Process(
            name,
            "services.worker",
            (
                *("--listen", join(LOOPBACK, ports[name])),
                *("--worker-id", name),
                *("--model", str(model)),
                *("--routers", addresses("router")),
                *("--engine", options.engine),
                *arguments(speedup=options.speedup),
                *_role(name, options),
                *worker_arguments(pipeline),
                *_common("worker", options),
            ),
            LOOPBACK,
            ports[name],
            env=_own_listeners("worker", index),
            python=options.processing.python_of(options.engine),
        )
        for index, name in enumerate(_names("worker", options))
    ]
    services = {module: addresses(module) for module in ("preprocess", "router", "postprocess")}
    # The configured model is loaded at once; models of workers that start later are discovered through the router.
    served = "" if options.engines is not None else str(options.processing.served(model, options.engine))
    model_arguments = ("--models", served, "--routers", addresses("router"))
    return [
        *grpc_services("preprocess", *model_arguments, *options.processing.preprocess_arguments()),
        *grpc_services("router", "--preprocess", addresses("preprocess"), env=secrets),
        *grpc_services("postprocess", *model_arguments, *options.processing.postprocess_arguments()),
        *workers,
        *_gateways(options, options.port or free_port(), services),
    ]


def _gateways(options: Options, port: int, services: Mapping[str, str]) -> list[Process]:
    """Returns the gateways; several share a port and, with Redis, the limits of API keys and stored responses."""
    several = options.gateways > 1
    shared = _SHARED_BY_GATEWAYS if several and options.redis else ()
    env = {name: options.redis for name in shared if name not in os.environ}
    return [
        Process(
            f"gateway-{index}" if several else "gateway",
            "services.gateway",
            (
                *("--listen", join(options.host, port)),
                *(word for name, addresses in services.items() for word in (f"--{name}", addresses)),
                *(("--reuse-port",) if several else ()),
                *options.pipeline.gateway_arguments(),
                *_common("gateway", options),
            ),
            options.host,
            port,
            "http",
            env={**env, **_own_listeners("gateway", index)},
            workers=1 if options.engines is not None else options.workers + options.prefill_workers,
            shares_port=several,
        )
        for index in range(options.gateways)
    ]


def _own_listeners(service: str, index: int) -> dict[str, str]:
    """Returns the further addresses set in the environment, such as SLUICE_ROUTER_HTTP_LISTEN, for one of a service's
    processes: each listens on the port after that of the one before, which would otherwise keep it from starting.
    """
    own: dict[str, str] = {}
    for name, value in os.environ.items():
        parsed = host_port(value) if index and _LISTENER.fullmatch(name) else None
        if parsed is not None and parsed[1] and name.startswith(f"SLUICE_{service.upper()}_"):
            own[name] = join(parsed[0], parsed[1] + index)
    return own


def _common(service: str, options: Options) -> tuple[str, ...]:
    """Returns the flags of every service; its log is quiet unless a flag or variable says otherwise."""
    level = options.log_level or (None if f"SLUICE_{service.upper()}_LOG_LEVEL" in os.environ else QUIET)
    return arguments(drain_s=DRAIN_S, log_level=level)


def _role(worker: str, options: Options) -> tuple[str, ...]:
    """Returns the worker's role flags: with prefill workers, all others are decode workers."""
    if not options.prefill_workers:
        return ()
    return ("--role", "prefill" if worker.startswith(_PREFILL) else "decode")


def _names(module: str, options: Options) -> list[str]:
    if module == "worker":
        if options.engines is not None:
            return []
        workers = [f"worker-{index}" for index in range(options.workers)]
        return workers + [f"{_PREFILL}{index}" for index in range(options.prefill_workers)]
    count: int = {"preprocess": options.preprocess, "router": options.routers, "postprocess": options.postprocess}[
        module
    ]
    return [module] if count == 1 else [f"{module}-{index}" for index in range(count)]


def _offsets(options: Options) -> dict[str, int]:
    """Returns the distance of each gRPC service's port from the base port."""
    by_module = {
        "preprocess": [0, *range(_EXTRA_PREPROCESS_OFFSET, _EXTRA_PREPROCESS_OFFSET + options.preprocess)],
        "router": list(_ROUTER_OFFSETS),
        "postprocess": [2, *range(_EXTRA_POSTPROCESS_OFFSET, _EXTRA_POSTPROCESS_OFFSET + options.postprocess)],
        "worker": list(range(_WORKER_OFFSET, _WORKER_OFFSET + options.workers + options.prefill_workers)),
    }
    return {
        name: offset
        for module, offsets in by_module.items()
        for name, offset in zip(_names(module, options), offsets, strict=False)
    }


def _model(options: Options) -> models.ModelSpec:
    source = os.path.expanduser(options.model)
    text = f"{options.model_name or models.default_name(source)}={source}"
    if options.processor:
        text += f"@{options.processor}"
    try:
        model = models.ModelSpec.parse(text)
        if (model.source, model.processor) != (source, options.processor):
            raise BadFlag("--model and --model-name must not contain '@' or '='.")
        if source.startswith((models.BUNDLED, ".", "/", "~")) or Path(source).exists():
            path = models.resolve(source)
            models.detect_processor(path)
    except ValueError as error:
        raise BadFlag(f"--model or --processor: {error}.") from error
    except SluiceError as error:
        raise BadFlag(f"--model: {error.message}") from error
    return model


def secured(processes: Sequence[Process], folder: Path) -> list[Process]:
    """Returns the processes with TLS on every connection: mTLS between services, HTTPS for clients."""
    return [
        replace(process, arguments=(*process.arguments, *tls_flags.flags(process.kind, folder)), tls=folder)
        for process in processes
    ]
