"""The command that starts a suite: `up`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from services.common.net.ports import free_port
from services.gateway.pipeline.config import Disaggregation, PresetName, Routing, StageLocation
from sluice.cli.up import supervisor as supervisor
from sluice.cli.up import tls as tls_flags
from sluice.cli.up.pipeline import PipelineFlags
from sluice.cli.up.plan import Options, check, plan
from sluice.cli.up.processing import ProcessingFlags
from sluice.cli.up.progress import View


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command("up")(up_suite)


def up_suite(
    host: Annotated[str, typer.Option(help="address the gateway listens on; the gRPC services stay on loopback")] = (
        Options.host
    ),
    port: Annotated[int, typer.Option(help="HTTP port of the gateway; 0: any free one")] = Options.port,
    base_grpc_port: Annotated[
        int,
        typer.Option(
            help="preprocess listens here, router on the next port, postprocess on the one after it, workers from +10, "
            "more routers from +4, more preprocess from +1000, more postprocess from +2000; 0: any free ports"
        ),
    ] = Options.base_grpc_port,
    workers: Annotated[int, typer.Option(help="number of workers")] = Options.workers,
    prefill_workers: Annotated[
        int, typer.Option(help="number of prefill workers; with any, the --workers are decode workers")
    ] = Options.prefill_workers,
    engine: Annotated[str, typer.Option(help="engine of the workers")] = Options.engine,
    model: Annotated[
        str, typer.Option(help="hub id, folder, or mistral-common:NAME for a tokenizer that package ships")
    ] = Options.model,
    model_name: Annotated[str, typer.Option(help="name under which clients ask for the model")] = Options.model_name,
    processor: Annotated[
        str,
        typer.Option(
            help="tokenizer implementation: hf, mistral, vllm, sglang or module:Class; empty: by the model's files"
        ),
    ] = Options.processor,
    redis: Annotated[
        str,
        typer.Option(
            envvar="SLUICE_ROUTER_REDIS_URL",
            help="where routers keep their state, and several gateways what they share, such as redis://localhost:6379/0",
        ),
    ] = Options.redis,
    gateways: Annotated[
        int, typer.Option(help="number of gateways, which share --port; without --redis each counts limits alone")
    ] = Options.gateways,
    routers: Annotated[int, typer.Option(help="number of routers; more than one needs --redis")] = Options.routers,
    preprocess: Annotated[int, typer.Option(help="number of preprocess services")] = Options.preprocess,
    postprocess: Annotated[int, typer.Option(help="number of postprocess services")] = Options.postprocess,
    speedup: Annotated[float | None, typer.Option(help="how much faster than real the mock engine's clock runs")] = (
        Options.speedup
    ),
    vllm_processing: Annotated[
        bool, typer.Option("--vllm-processing", help="vLLM's own code makes prompts' ids and parses answers")
    ] = False,
    sglang_processing: Annotated[
        bool, typer.Option("--sglang-processing", help="SGLang's own code makes prompts' ids and parses answers")
    ] = False,
    trtllm_processing: Annotated[
        bool, typer.Option("--trtllm-processing", help="not available; docs/preprocessing.md says how to plug it in")
    ] = False,
    native_framework_processing: Annotated[
        bool,
        typer.Option("--native-framework-processing", help="the same with the code of each worker's engine, if any"),
    ] = False,
    native_parsers: Annotated[
        bool,
        typer.Option(
            "--native-parsers/--no-native-parsers",
            help="whether one of these flags is for answers as well as for prompts",
        ),
    ] = True,
    vllm_python: Annotated[str, typer.Option(help="interpreter that has vllm, if not this one")] = "",
    sglang_python: Annotated[str, typer.Option(help="interpreter that has sglang, if not this one")] = "",
    preset: Annotated[PresetName | None, typer.Option(help="of the gateway's pipeline")] = None,
    pipeline_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML, YAML or JSON with the gateway's pipeline")
    ] = None,
    preprocessing: Annotated[StageLocation | None, typer.Option(help="who makes token ids")] = None,
    postprocessing: Annotated[StageLocation | None, typer.Option(help="who makes text")] = None,
    routing: Annotated[Routing | None, typer.Option(help="who chooses the worker")] = None,
    migration: Annotated[
        bool | None,
        typer.Option(
            "--migration/--no-migration",
            "--migration-enabled/--no-migration-enabled",
            help="generations outlive their workers",
        ),
    ] = None,
    direct_route: Annotated[bool, typer.Option("--direct-route", help="another name of --routing direct")] = False,
    disaggregation: Annotated[
        Disaggregation | None, typer.Option(help="whether prefill and decode workers share requests")
    ] = None,
    disagg_min_tokens: Annotated[
        int | None, typer.Option(min=0, help="shorter prompts are not shared, tokens", show_default=False)
    ] = None,
    stage: Annotated[
        list[str] | None, typer.Option(metavar="NAME=MODULE:CLASS", help="a stage of your own; may be repeated")
    ] = None,
    handler: Annotated[str | None, typer.Option(metavar="MODULE:CLASS", help="a pipeline of your own")] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, typer.Option(help="least severe log line of all services")
    ] = None,
    tls: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="folder of `sluice certs`: TLS everywhere, with each service's own file"),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="start a process again that ended by itself, up to 3 times a minute")
    ] = False,
) -> None:
    """Start the whole suite as local processes; Ctrl-C stops it.

    When a process ends by itself, the others are stopped as well and the exit code is 1, unless --restart is given.
    Other settings of a service are environment variables, such as SLUICE_GATEWAY_LOG_FORMAT=json.
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
    processes = plan(options, free_port)
    if tls is not None:
        processes = tls_flags.secured(processes, tls)
    view = View(processes, Console(stderr=True, highlight=False))
    if note := options.processing.note(engine):
        view.say(note, "bold yellow")
    raise typer.Exit(supervisor.run(processes, view, name, restart))
