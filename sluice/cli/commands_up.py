"""The command `up`, which starts a suite."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from services.common.net.ports import free_port
from services.gateway.pipeline.config import Disaggregation, PresetName, Routing, StageLocation
from sluice.cli.up import supervisor
from sluice.cli.up.engine_list import engine_list
from sluice.cli.up.pipeline import PipelineFlags
from sluice.cli.up.plan import ListedEngine, Options, Process, check, engine_process, plan, secured
from sluice.cli.up.processing import ProcessingFlags
from sluice.cli.up.progress import View

SWITCHES = ("migration", "migration-enabled", "native-parsers")
"""Flags of `sluice up` that are on or off, both of which can be given."""


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command("up")(up_suite)


def up_suite(
    host: Annotated[
        str, typer.Option(help="address on which the gateway listens; the gRPC services stay on loopback")
    ] = (Options.host),
    port: Annotated[int, typer.Option(help="HTTP port of the gateway; 0: any free one")] = Options.port,
    base_grpc_port: Annotated[
        int,
        typer.Option(
            help="first gRPC port: preprocess; the router has the next one, postprocess the one after it, workers from "
            "+10, more routers from +4, more preprocess from +1000, more postprocess from +2000; 0: any free ports"
        ),
    ] = Options.base_grpc_port,
    workers: Annotated[int, typer.Option(help="number of workers")] = Options.workers,
    prefill_workers: Annotated[
        int, typer.Option(help="number of prefill workers; if above 0, the --workers are decode workers")
    ] = Options.prefill_workers,
    engine: Annotated[str, typer.Option(help="engine of the workers")] = Options.engine,
    model: Annotated[
        str, typer.Option(help="hub id, folder, or mistral-common:NAME for a tokenizer of that package")
    ] = Options.model,
    model_name: Annotated[str, typer.Option(help="name under which clients request the model")] = Options.model_name,
    processor: Annotated[
        str,
        typer.Option(
            help="tokenizer implementation: hf, mistral, vllm, sglang or module:Class; empty: by the model's files"
        ),
    ] = Options.processor,
    engines: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML list of running vLLM and SGLang servers to serve instead of own workers; read again when it "
            "changes (docs/engines-http.md)",
        ),
    ] = None,
    redis: Annotated[
        str,
        typer.Option(
            envvar="SLUICE_ROUTER_REDIS_URL",
            help="URL of the Redis for the state of routers and the shared state of gateways, such as redis://localhost:6379/0",
        ),
    ] = Options.redis,
    gateways: Annotated[
        int, typer.Option(help="number of gateways, which share --port; without --redis each counts limits separately")
    ] = Options.gateways,
    routers: Annotated[int, typer.Option(help="number of routers; more than one needs --redis")] = Options.routers,
    preprocess: Annotated[int, typer.Option(help="number of preprocess services")] = Options.preprocess,
    postprocess: Annotated[int, typer.Option(help="number of postprocess services")] = Options.postprocess,
    speedup: Annotated[
        float | None, typer.Option(help="factor by which the mock engine's clock runs faster than real time")
    ] = (Options.speedup),
    vllm_processing: Annotated[
        bool, typer.Option("--vllm-processing", help="use vLLM's own code to tokenize prompts and parse output")
    ] = False,
    sglang_processing: Annotated[
        bool, typer.Option("--sglang-processing", help="use SGLang's own code to tokenize prompts and parse output")
    ] = False,
    trtllm_processing: Annotated[
        bool,
        typer.Option("--trtllm-processing", help="not available; docs/preprocessing.md describes how to integrate it"),
    ] = False,
    native_framework_processing: Annotated[
        bool,
        typer.Option("--native-framework-processing", help="use the code of each worker's engine, if any"),
    ] = False,
    native_parsers: Annotated[
        bool,
        typer.Option(
            "--native-parsers/--no-native-parsers",
            help="whether these --…-processing flags apply to output as well as to prompts",
        ),
    ] = True,
    vllm_python: Annotated[str, typer.Option(help="Python interpreter that has vllm; default: this one")] = "",
    sglang_python: Annotated[str, typer.Option(help="Python interpreter that has sglang; default: this one")] = "",
    preset: Annotated[PresetName | None, typer.Option(help="preset of the gateway's pipeline")] = None,
    pipeline_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML, YAML or JSON file with the gateway's pipeline")
    ] = None,
    preprocessing: Annotated[StageLocation | None, typer.Option(help="where prompts are tokenized")] = None,
    postprocessing: Annotated[StageLocation | None, typer.Option(help="where tokens are converted to text")] = None,
    routing: Annotated[Routing | None, typer.Option(help="how workers are selected")] = None,
    migration: Annotated[
        bool | None,
        typer.Option(
            "--migration/--no-migration",
            "--migration-enabled/--no-migration-enabled",
            help="continue generations on another worker when theirs is lost",
        ),
    ] = None,
    direct_route: Annotated[bool, typer.Option("--direct-route", help="same as --routing direct")] = False,
    disaggregation: Annotated[
        Disaggregation | None, typer.Option(help="whether requests are split between prefill and decode workers")
    ] = None,
    disagg_min_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="minimum prompt length in tokens for splitting a request", show_default=False),
    ] = None,
    stage: Annotated[
        list[str] | None, typer.Option(metavar="NAME=MODULE:CLASS", help="custom stage; may be repeated")
    ] = None,
    handler: Annotated[str | None, typer.Option(metavar="MODULE:CLASS", help="custom pipeline")] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, typer.Option(help="log level of all services")
    ] = None,
    tls: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="folder of `sluice certs`: use TLS on every connection, with each service's own certificate",
        ),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="restart a process that exits unexpectedly, up to 3 times a minute")
    ] = False,
) -> None:
    """Start the whole suite as local processes; Ctrl-C stops it.

    When a process exits unexpectedly, the others are stopped and the exit code is 1, unless --restart is given.
    Set other settings of a service through environment variables, such as SLUICE_GATEWAY_LOG_FORMAT=json.
    """
    options = Options(
        host=host,
        port=port,
        base_grpc_port=base_grpc_port,
        workers=workers,
        prefill_workers=prefill_workers,
        engine=engine,
        model=model,
        model_name=model_name,
        processor=processor,
        redis=redis,
        gateways=gateways,
        routers=routers,
        preprocess=preprocess,
        postprocess=postprocess,
        speedup=speedup,
        processing=ProcessingFlags(
            vllm_processing=vllm_processing,
            sglang_processing=sglang_processing,
            trtllm_processing=trtllm_processing,
            native_framework_processing=native_framework_processing,
            native_parsers=native_parsers,
            vllm_python=vllm_python,
            sglang_python=sglang_python,
        ),
        log_level=log_level,
        tls=tls,
        engines=engines,
        pipeline=PipelineFlags(
            preset=preset,
            pipeline_config=pipeline_config,
            preprocessing=preprocessing,
            postprocessing=postprocessing,
            routing=routing,
            direct_route=direct_route,
            migration=migration,
            disaggregation=disaggregation,
            disagg_min_tokens=disagg_min_tokens,
            stage=tuple(stage or ()),
            handler=handler,
        ),
    )
    name = check(options).name
    listed = None if engines is None else engine_list(engines)
    if listed is not None:
        listed.check()
    processes = plan(options, free_port)
    if tls is not None:
        processes = secured(processes, tls)
    view = View(processes, Console(stderr=True, highlight=False))
    if note := options.processing.note(engine):
        view.report(note, "bold yellow")
    if listed is None:
        raise typer.Exit(supervisor.run(processes, view, name, restart))
    engine_workers = listed.workers(partial(_worker_of, options, processes), view)
    raise typer.Exit(supervisor.run(processes, view, "", restart, engine_workers))


def _worker_of(options: Options, processes: Sequence[Process], entry: ListedEngine, port: int) -> Process:
    routers = ",".join(process.address for process in processes if process.kind == "router")
    process = engine_process(options, entry, routers, port)
    return process if options.tls is None else secured([process], options.tls)[0]
