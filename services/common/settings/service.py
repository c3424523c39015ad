"""Settings: each declaration gives a flag, an environment variable, a secret file and a line in --help."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from services.common.net.addresses import host_port
from services.common.security.settings import AccessSettings, PeerTokenSettings
from services.common.security.settings import TlsSettings as TlsSettings
from services.common.settings.otel_environment import OtelDefaults

SECRETS_DIR = Path("/run/secrets")
# Kubernetes sets variables for every Service in every pod, and a Service may be named sluice-router.
_SERVICE_LINK = re.compile(r"(^|_)(SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?)$")


def _split(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        return value
    return [part.strip() for text in texts for part in str(text).split(",") if part.strip()]


CommaList = Annotated[list[str], NoDecode, BeforeValidator(_split)]
"""Several values: the flag repeated, or one comma-separated string as flag or environment variable."""


def spelled_out(arguments: Sequence[str], switches: Collection[str]) -> list[str]:
    """Returns arguments in which `--switch false` and `--switch=false` are `--no-switch`, and `true` is `--switch`.

    Args:
        switches: names of the flags that are on or off.
    """
    result: list[str] = []
    words = iter(arguments)
    pending = next(words, None)
    while (word := pending) is not None:
        pending = next(words, None)
        name, equals, value = word.removeprefix("--").partition("=")
        if word == "--":
            return [*result, word, *([pending] if pending is not None else []), *words]
        if not word.startswith("--") or name not in switches:
            result.append(word)
            continue
        given = value if equals else (pending or "")
        if given.lower() not in ("true", "false"):
            result.append(word)
            continue
        result.append(f"--{name}" if given.lower() == "true" else f"--no-{name}")
        if not equals:
            pending = next(words, None)
    return result


def _is_switch(annotation: Any) -> bool:
    return annotation is bool or (set(get_args(annotation)) == {bool, type(None)})


def _check_addresses(addresses: list[str]) -> list[str]:
    for address in addresses:
        if host_port(address) is None:
            raise ValueError(f"{address!r} is not host:port")
    return addresses


Address = Annotated[str, AfterValidator(lambda text: text and _check_addresses([text])[0])]
"""host:port, or empty."""

AddressList = Annotated[CommaList, AfterValidator(_check_addresses)]
"""A CommaList of host:port addresses."""


def settings_config(service: str) -> SettingsConfigDict:
    """Returns the `model_config` of a service; its environment variables are SLUICE_<SERVICE>_<NAME>."""
    return SettingsConfigDict(
        env_prefix=f"SLUICE_{service.upper()}_",
        secrets_dir=SECRETS_DIR if SECRETS_DIR.is_dir() else None,
        cli_prog_name=f"python -m services.{service}",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
        cli_avoid_json=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
    )


class ServiceSettings(PeerTokenSettings, TlsSettings):
    """Settings common to all services.

    Attributes:
        session_pause_s: longest pause between two messages of a session that writes continuously, seconds; a message
            after a silence is sent at once.
    """

    session_pause_s: ClassVar[float] = 0.005

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="minimum severity of log lines")
    log_format: Literal["text", "json"] = Field("text", description="format of log lines: human-readable text or JSON")
    metrics_listen: str = Field("", description="host:port of the Prometheus endpoint; empty: no metrics")
    metrics_tls: bool = Field(
        False, description="serve the Prometheus endpoint over TLS with tls-cert, tls-key and tls-ca"
    )
    otlp_endpoint: str = Field(
        "",
        description="OTLP/gRPC collector for traces, such as http://localhost:4317; empty: off; defaults to "
        "OpenTelemetry's variables, such as OTEL_EXPORTER_OTLP_ENDPOINT",
    )
    trace_sample: float = Field(
        1.0, ge=0, le=1, description="share of traces recorded for requests that arrive without one"
    )
    drain_s: float = Field(10.0, ge=0, description="seconds that running requests have to finish after SIGTERM")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Returns the sources of values in order of precedence; OpenTelemetry's variables come last."""
        return init_settings, env_settings, dotenv_settings, file_secret_settings, OtelDefaults(settings_cls)

    @classmethod
    def load(cls, argv: list[str] | None = None) -> Self:
        """Reads flags, then environment, secret files and OpenTelemetry's variables.

        Prints one sentence and exits with 2 when a value is invalid.
        """
        switches = [name.replace("_", "-") for name, field in cls.model_fields.items() if _is_switch(field.annotation)]
        arguments = spelled_out(sys.argv[1:] if argv is None else argv, switches)
        try:
            source: CliSettingsSource[Self] = CliSettingsSource(cls, cli_parse_args=arguments)
            return cls(_cli_settings_source=source)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            name = "-".join(str(part) for part in first["loc"]).replace("_", "-")
            message = first["msg"].removeprefix("Value error, ")
            _refuse(cls, f"--{name}: {message}" if name else message)
        except SettingsError as error:
            _refuse(cls, str(error))

    @classmethod
    def misspelt(cls, variables: Iterable[str]) -> list[str]:
        """Returns a sentence for each environment variable that looks like a setting of this service but is not."""
        prefix, known = str(cls.model_config.get("env_prefix", "")).upper(), [name.upper() for name in cls.model_fields]
        given = {name.upper().removeprefix(prefix) for name in variables if prefix and name.upper().startswith(prefix)}
        problems = []
        for name in sorted(given - {*known}):
            if not _SERVICE_LINK.search(name):
                similar = get_close_matches(name, known, 1, 0.75)
                hint = f"; did you mean {prefix}{similar[0]}?" if similar else "."
                problems.append(f"{prefix}{name} is not a setting and has no effect{hint}")
        return problems


class GrpcServiceSettings(AccessSettings, ServiceSettings):
    """Settings of the services that serve gRPC.

    Attributes:
        max_message_mb: size of a gRPC message that the service accepts, MiB.
    """

    max_message_mb: ClassVar[int] = 16

    listen: str = Field("127.0.0.1:50051", description="host:port of the gRPC server")
    trace_sample: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of traces recorded for callers that send none; a gateway's decision is always followed",
    )
    max_connection_age_s: float = Field(
        0,
        ge=0,
        description="seconds after which connections are closed so that proxies rebalance; running streams finish; "
        "0: never",
    )
    reflection: bool | None = Field(
        None, description="enable gRPC reflection for tools such as grpcurl; unset: only if listening on loopback"
    )


def _refuse(cls: type[BaseSettings], message: str) -> NoReturn:
    program = cls.model_config.get("cli_prog_name") or cls.__name__
    print(f"{program}: {message}", file=sys.stderr)
    raise SystemExit(2)
