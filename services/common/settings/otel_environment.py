"""OpenTelemetry's environment variables, as defaults below Sluice's own settings.

`docs/observability.md` lists them. OpenTelemetry's exporter reads its own variables (certificates, compression), and
its SDK reads OTEL_RESOURCE_ATTRIBUTES.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from pydantic.fields import FieldInfo
from pydantic_settings import PydanticBaseSettingsSource

_OTLP = "OTEL_EXPORTER_OTLP_"
_SAMPLERS = {"always_on": 1.0, "always_off": 0.0, "traceidratio": None}
_PARENT_BASED = "parentbased_"
_HEADER_NAME = re.compile(r"[a-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class OtelEnvironment:
    """The values of the environment variables.

    Attributes:
        endpoint: address of the collector; empty: not set, or not to be used.
        sample: share of traces recorded when the caller made no decision, 0 to 1; None: not set.
        headers: metadata of every export, such as an authorization header.
        off: a sentence why traces are off although the variables name a collector; empty otherwise.
        problems: a sentence about each variable that is not followed exactly.
    """

    endpoint: str = ""
    sample: float | None = None
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    off: str = ""
    problems: tuple[str, ...] = ()


def read(environ: Mapping[str, str]) -> OtelEnvironment:
    """Reads the variables; never raises, because other software may have set them."""
    problems: list[str] = []
    endpoint, off = _endpoint(environ, problems)
    sample = _sample(environ, problems)
    headers = _headers(environ, problems)
    _check_propagators(environ, problems)
    return OtelEnvironment(endpoint, sample, headers, off, tuple(problems))


class OtelDefaults(PydanticBaseSettingsSource):
    """Settings source with the lowest precedence: after flags, Sluice's own variables and secret files."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Returns a setting's default, its name, and that it is not JSON."""
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        variables = read(os.environ)
        defaults = {"otlp_endpoint": variables.endpoint or None, "trace_sample": variables.sample}
        return {
            name: value
            for name, value in defaults.items()
            if value is not None and name in self.settings_cls.model_fields
        }


def _given(environ: Mapping[str, str], *names: str) -> tuple[str, str]:
    """Returns the name and value of the first variable that is set and not empty, or two empty strings."""
    return next(((name, value) for name in names if (value := environ.get(name, "").strip())), ("", ""))


def _endpoint(environ: Mapping[str, str], problems: list[str]) -> tuple[str, str]:
    _, endpoint = _given(environ, f"{_OTLP}TRACES_ENDPOINT", f"{_OTLP}ENDPOINT")
    if not endpoint:
        return "", ""
    name, exporter = _given(environ, "OTEL_TRACES_EXPORTER")
    if exporter == "none":
        return "", ""
    if exporter not in ("", "otlp"):
        problems.append(f"{name} is {exporter!r}, but Sluice exports traces with otlp only.")
    name, protocol = _given(environ, f"{_OTLP}TRACES_PROTOCOL", f"{_OTLP}PROTOCOL")
    if protocol in ("", "grpc"):
        return endpoint, ""
    return "", (
        f"Traces are off: {name} is {protocol!r}, but Sluice sends them over gRPC only; set it to grpc and the "
        "endpoint to the collector's gRPC port, or set --otlp-endpoint."
    )


def _sample(environ: Mapping[str, str], problems: list[str]) -> float | None:
    name, sampler = _given(environ, "OTEL_TRACES_SAMPLER")
    if not sampler:
        return None
    kind = sampler.removeprefix(_PARENT_BASED)
    if kind not in _SAMPLERS:
        problems.append(
            f"{name} is {sampler!r}, which Sluice does not support; --trace-sample applies instead. Use always_on, "
            "always_off or traceidratio, optionally prefixed with parentbased_."
        )
        return None
    if kind == sampler:
        problems.append(f"{name} is {sampler!r}; a caller's sampling decision still applies, as with parentbased_.")
    share = _SAMPLERS[kind]
    return _share(environ, problems) if share is None else share


def _share(environ: Mapping[str, str], problems: list[str]) -> float:
    name, text = _given(environ, "OTEL_TRACES_SAMPLER_ARG")
    try:
        share = float(text or 1)
    except ValueError:
        share = -1.0
    if 0 <= share <= 1:
        return share
    problems.append(f"{name} is {text!r} but must be a number from 0 to 1; all traces are recorded.")
    return 1.0


def _headers(environ: Mapping[str, str], problems: list[str]) -> tuple[tuple[str, str], ...]:
    """Parses comma-separated, URL-encoded key=value pairs; values are secrets and not repeated in problems."""
    variable, text = _given(environ, f"{_OTLP}TRACES_HEADERS", f"{_OTLP}HEADERS")
    headers = []
    for number, pair in enumerate(filter(None, map(str.strip, text.split(","))), 1):
        key, equals, value = pair.partition("=")
        name, value = unquote(key).strip().lower(), unquote(value).strip()
        if equals and _HEADER_NAME.fullmatch(name) and value.isascii() and value.isprintable():
            headers.append((name, value))
        else:
            problems.append(f"{variable}: entry {number} is not URL-encoded name=value and was ignored.")
    return tuple(headers)


def _check_propagators(environ: Mapping[str, str], problems: list[str]) -> None:
    name, text = _given(environ, "OTEL_PROPAGATORS")
    others = [propagator for item in text.split(",") if (propagator := item.strip()) not in ("", "tracecontext")]
    if others:
        problems.append(f"{name} lists {', '.join(others)}; Sluice propagates tracecontext (traceparent) only.")
