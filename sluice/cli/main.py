"""The `sluice` command."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal, NoReturn, Protocol, cast

import typer
from rich.console import Console

from services.gateway.config import Disaggregation, Place, PresetName, Routing
from sluice.cli import operating, ports, secured, up
from sluice.cli.pipeline import PipelineFlags
from sluice.cli.plan import BadFlag, Options, check, plan
from sluice.cli.progress import View

app = typer.Typer(
    name="sluice",
    help="Serve large language models as a suite of small gRPC services.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

keys_app = typer.Typer(help="API keys of the gateway.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(keys_app, name="keys")
_KeysFile = Annotated[
    Path, typer.Option("--file", envvar="SLUICE_GATEWAY_API_KEYS_FILE", help="where the keys are kept, as hashes")
]

# Typer carries its own copy of click in some versions: this is the base of its errors in all of them.
_CommandLineError = cast(type[Exception], typer.BadParameter.__mro__[2])


class _Speaks(Protocol):
    def format_message(self) -> str: ...


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(metadata.version("sluice"))


@app.command("up")
def up_command(
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
            envvar="SLUICE_ROUTER_REDIS_URL", help="where routers keep their state, such as redis://localhost:6379/0"
        ),
    ] = Options.redis,
    routers: Annotated[int, typer.Option(help="number of routers; more than one needs --redis")] = Options.routers,
    preprocess: Annotated[int, typer.Option(help="number of preprocess services")] = Options.preprocess,
    postprocess: Annotated[int, typer.Option(help="number of postprocess services")] = Options.postprocess,
    speedup: Annotated[float | None, typer.Option(help="how much faster than real the mock engine's clock runs")] = (
        Options.speedup
    ),
    vllm_processing: Annotated[
        bool, typer.Option("--vllm-processing", help="vLLM's own code makes the ids; see SLUICE_PREPROCESS_VLLM_PYTHON")
    ] = Options.vllm_processing,
    sglang_processing: Annotated[
        bool,
        typer.Option(
            "--sglang-processing", help="SGLang's own code makes the ids; see SLUICE_PREPROCESS_SGLANG_PYTHON"
        ),
    ] = Options.sglang_processing,
    native_framework_processing: Annotated[
        bool, typer.Option("--native-framework-processing", help="the code of the workers' engine makes the ids")
    ] = Options.native_framework_processing,
    preset: Annotated[PresetName | None, typer.Option(help="of the gateway's pipeline")] = None,
    pipeline_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML, YAML or JSON with the gateway's pipeline")
    ] = None,
    preprocessing: Annotated[Place | None, typer.Option(help="who makes token ids")] = None,
    postprocessing: Annotated[Place | None, typer.Option(help="who makes text")] = None,
    routing: Annotated[Routing | None, typer.Option(help="who chooses the worker")] = None,
    migration: Annotated[
        bool | None, typer.Option("--migration/--no-migration", help="generations outlive their workers")
    ] = None,
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
        typer.Option(metavar="DIR", help="TLS everywhere, with the certificates that `sluice certs DIR` made"),
    ] = None,
) -> None:
    """Start the whole suite as local processes; Ctrl-C stops it.

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
        routers=routers,
        preprocess=preprocess,
        postprocess=postprocess,
        speedup=speedup,
        vllm_processing=vllm_processing,
        sglang_processing=sglang_processing,
        native_framework_processing=native_framework_processing,
        log_level=log_level,
        tls=tls,
        pipeline=PipelineFlags(
            preset=preset,
            pipeline_config=pipeline_config,
            preprocessing=preprocessing,
            postprocessing=postprocessing,
            routing=routing,
            migration=migration,
            disaggregation=disaggregation,
            disagg_min_tokens=disagg_min_tokens,
            stage=tuple(stage or ()),
            handler=handler,
        ),
    )
    name = check(options).name
    processes = plan(options, ports.FreePorts().take)
    if tls is not None:
        processes = secured.secured(processes, tls)
    raise typer.Exit(up.run(processes, View(processes, Console(stderr=True, highlight=False)), name))


@app.command(
    "worker",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def worker_command() -> None:
    """Start one worker, which registers with --routers; the flags are those of `python -m services.worker`."""
    try:
        from sluice.cli import worker
    except ImportError as error:
        raise BadFlag(f"worker needs the package {error.name}: install sluice[worker]") from error
    worker.run_worker(sys.argv[sys.argv.index("worker") + 1 :])  # as they stand: `--` begins the engine's own flags


@app.command("engines")
def engines_command(
    as_table: Annotated[bool, typer.Option("--table", help="what each honours, as a table")] = False,
    write: Annotated[Path | None, typer.Option(help="write the table into this document instead")] = None,
) -> None:
    """List the engines by name."""
    from sluice.cli import engines

    if write is not None and not write.is_file():
        raise BadFlag(f"--write {write} does not exist")
    raise typer.Exit(engines.run(as_table, write))


@app.command("diff-tokenizers")
def diff_command(
    left: Annotated[str, typer.Argument(metavar="A", help="SOURCE[@PROCESSOR], such as ./model@hf")],
    right: Annotated[str, typer.Argument(metavar="B", help="the same for the other side, such as ./model@vllm")],
    chats: Annotated[
        Path | None, typer.Option(help="file with a chat a line, JSON with messages; by default a fixed set")
    ] = None,
    vllm_python: Annotated[str, typer.Option(help="interpreter that has vllm, if not this one")] = "",
    sglang_python: Annotated[str, typer.Option(help="interpreter that has sglang, if not this one")] = "",
) -> None:
    """Show where two tokenizers make different prompts, side by side; exit code 1 when they do."""
    try:
        from services.preprocess.engine_tokenizer import EngineOptions
        from sluice.cli import diff
    except ImportError as error:
        raise BadFlag(f"diff-tokenizers needs the package {error.name}: install sluice[preprocess]") from error
    engines = {"vllm": EngineOptions(python=vllm_python), "sglang": EngineOptions(python=sglang_python)}
    if chats is not None and not chats.is_file():
        raise BadFlag(f"--chats {chats} does not exist")
    raise typer.Exit(
        diff.run(left, right, diff.read_chats(chats) if chats is not None else diff.default_chats(), engines)
    )


@app.command("conformance")
def conformance_command(
    address: Annotated[str, typer.Argument(help="host:port of the worker's gRPC server")] = "",
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="also write the results as JUnit XML")] = None,
    rule: Annotated[list[str] | None, typer.Option(metavar="NAME", help="only this rule; may be repeated")] = None,
    list_rules: Annotated[bool, typer.Option("--list", help="print every rule and what it proves")] = False,
    patience: Annotated[float, typer.Option(help="multiplies every deadline, for slow engines")] = 1.0,
    router_listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="be a router here, for a worker started with it as --routers")
    ] = "",
    prefill_peer: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="a prefill worker of the same model, to try a decode worker with")
    ] = "",
    stop_command: Annotated[
        str, typer.Option(metavar="COMMAND", help="stops the worker, such as 'kill PID'; then the drain is tried, last")
    ] = "",
    tls_ca: Annotated[
        Path | None, typer.Option(help="authorities the kit trusts (PEM file); unset: plain text")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="certificate the kit shows (PEM file)")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="private key of tls-cert (PEM file)")] = None,
) -> None:
    """Try every rule of the worker contract on a running worker; exit code 1 when one is broken."""
    try:
        from sluice.cli import conformance
    except ImportError as error:
        raise BadFlag(f"conformance needs the package {error.name}: install sluice[worker]") from error
    console = Console(highlight=False)
    if list_rules:
        conformance.list_rules(console)
        return
    if not address:
        raise BadFlag("conformance needs the ADDRESS of a worker, such as 127.0.0.1:50061")
    options = conformance.Options(
        address=address,
        junit=junit,
        rules=tuple(rule or ()),
        patience=patience,
        router_listen=router_listen,
        prefill_peer=prefill_peer,
        stop_command=stop_command,
        tls_ca=tls_ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
    )
    raise typer.Exit(conformance.run(options, console))


@app.command("certs")
def certs_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="where they are, or go")],
    name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="only this certificate; may be repeated; default: all")
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="a name or address they carry too; may be repeated")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="how long they are valid")] = 90,
    renew: Annotated[bool, typer.Option("--renew", help="replace those that are there, by the same authority")] = False,
) -> None:
    """Make a development authority and a certificate for each service, for `sluice up --tls DIR`."""
    try:
        from sluice.cli import certs
    except ImportError as error:
        raise BadFlag(f"certs needs the package {error.name}: install sluice[cli]") from error
    options = certs.Options(names=tuple(name or certs.NAMES), hosts=tuple(host or ()), days=days, renew=renew)
    try:
        for said in certs.make(folder, options):
            typer.echo(said)
    except certs.BadFolder as error:
        raise BadFlag(str(error)) from error


operating.add_to(app)


@keys_app.command("create")
def keys_create(
    name: Annotated[str, typer.Argument(help="whose key it is, for people")],
    file: _KeysFile,
    requests_per_minute: Annotated[int, typer.Option(help="0: no limit")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(help="of prompts and answers together; 0: no limit")] = 0,
    concurrency: Annotated[int, typer.Option(help="requests at once; 0: no limit")] = 0,
    model: Annotated[list[str] | None, typer.Option(help="a model it may use, repeated; none: all")] = None,
    priority: Annotated[int, typer.Option(help="0 to 9; higher ones leave the line first")] = 0,
    weight: Annotated[int, typer.Option(help="1 to 100; its share of the line")] = 1,
) -> None:
    """Make a key and print it; it cannot be shown again."""
    from sluice.cli import keys

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrency": concurrency,
        "models": model or [],
        "priority": priority,
        "weight": weight,
    }
    typer.echo(keys.create(file, name, **limits))


@keys_app.command("list")
def keys_list(file: _KeysFile) -> None:
    """List the keys and their limits."""
    from sluice.cli import keys

    keys.show(file, Console(highlight=False))


@keys_app.command("revoke")
def keys_revoke(key: Annotated[str, typer.Argument(help="its id")], file: _KeysFile) -> None:
    """Make a key invalid; gateways notice within a second."""
    from sluice.cli import keys

    revoked = keys.revoke(file, key)
    typer.echo(f"{revoked.id} ({revoked.name}) is revoked")


def main() -> NoReturn:
    """Entry point: a mistake on the command line is one sentence on standard error and exit code 2."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except _CommandLineError as error:
        _refuse(cast(_Speaks, error).format_message())
    except BadFlag as error:
        _refuse(str(error))
    sys.exit(code)


def _refuse(message: str) -> NoReturn:
    sentence = " ".join(message.split())
    print(f"sluice: {sentence if sentence.endswith('.') else sentence + '.'}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
