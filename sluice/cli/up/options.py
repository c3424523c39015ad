"""The flags of `sluice up`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pydantic_settings import BaseSettings

from services.common.packages.model_files import DEFAULT_SOURCE
from services.worker.settings import WorkerSettings
from sluice.cli.flags import flag
from sluice.cli.up.pipeline import PipelineFlags
from sluice.cli.up.processing import ProcessingFlags

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Options:
    """Holds the flags of `sluice up`; None leaves a service its own setting."""

    SETTINGS: ClassVar[type[BaseSettings]] = WorkerSettings

    host: str = flag(LOOPBACK, "address on which the gateway listens; the gRPC services stay on loopback")
    port: int = flag(8000, "HTTP port of the gateway; 0: any free one")
    base_grpc_port: int = flag(
        50051,
        "first gRPC port: preprocess; the router has the next one, postprocess the one after it, workers from +10, "
        "more routers from +4, more preprocess from +1000, more postprocess from +2000; 0: any free ports",
    )
    workers: int = flag(2, "number of workers")
    prefill_workers: int = flag(0, "number of prefill workers; if above 0, the --workers are decode workers")
    engine: str = flag("mock", "engine of the workers")
    model: str = flag(DEFAULT_SOURCE, "hub id, folder, or mistral-common:NAME for a tokenizer of that package")
    model_name: str = flag("", "name under which clients request the model")
    processor: str = flag(
        "", "tokenizer implementation: hf, mistral, vllm, sglang or module:Class; empty: by the model's files"
    )
    engines: Path | None = flag(
        None,
        "YAML list of running vLLM and SGLang servers to serve instead of own workers; read again when it changes "
        "(docs/engines-http.md)",
        metavar="FILE",
    )
    redis: str = flag(
        "",
        "URL of the Redis for the state of routers and the shared state of gateways, such as redis://localhost:6379/0",
        envvar="SLUICE_ROUTER_REDIS_URL",
        repr=False,
    )
    gateways: int = flag(1, "number of gateways, which share --port; without --redis each counts limits separately")
    routers: int = flag(1, "number of routers; more than one needs --redis")
    preprocess: int = flag(1, "number of preprocess services")
    postprocess: int = flag(1, "number of postprocess services")
    speedup: float | None = None
    processing: ProcessingFlags = field(default_factory=ProcessingFlags)
    pipeline: PipelineFlags = field(default_factory=PipelineFlags)
    log_level: str | None = None
    tls: Path | None = flag(
        None,
        "folder of `sluice certs`: use TLS on every connection, with each service's own certificate",
        metavar="DIR",
    )
    restart: bool = flag(
        True,
        "whether a process that ends is restarted, up to 5 times in two minutes; --no-restart: then the suite stops",
        "--restart/--no-restart",
    )
