"""One running server of a registry, and the rules of its fields."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.common.base.errors import MAX_NAME_LENGTH, quoted
from services.common.net.addresses import is_reachable
from services.common.packages.model_files import ModelSpec
from services.worker.engines.http.options import NO_EVENTS, endpoint_problem, url_problem

MAX_ENGINES = 990
"""Engines in the file of `sluice follow`; a file with more is refused."""
MAX_BLOCK = 1024
"""Tokens of a block in the file of `sluice follow`; a file with a larger one is refused."""
OPENAI = "openai"
GRPC = "grpc://"
"""Scheme of the URL of a `vllm serve --grpc`."""
WITHOUT_GRPC = ("kv_events", "kv_replay", "api_key_file", "api")
"""Fields that mean nothing for such a server, whose KV events arrive over the same connection."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class BadRegistry(Exception):
    """Raised for an invalid or unavailable list; for a mistake in a file the message is `FILE:LINE: FIELD …`."""


class RegistryUnavailable(BadRegistry):
    """Raised when a valid list cannot be read at the moment."""


class NothingListed(RegistryUnavailable):
    """Raised when what lists the servers responds without a list, which must not remove all of them."""


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One running server; empty and zero leave the choice to the server.

    Attributes:
        name: id of its worker.
        url: http(s)://host:port, or grpc://host:port of a `vllm serve --grpc`.
        api: openai: text in and text out; empty: the API of vLLM or SGLang, with token ids.
        line: where it begins in its file; not part of its identity.
    """

    name: str
    url: str
    kv_events: str = ""
    kv_replay: str = ""
    api_key_file: str = ""
    model: str = ""
    block_size: int = 0
    api: str = ""
    line: int = field(default=0, compare=False)

    def worker_arguments(self) -> tuple[str, ...]:
        """Returns the flags of its worker."""
        if self.url.startswith(GRPC):
            engine, options = "vllm-grpc", {"address": self.url.removeprefix(GRPC).rstrip("/")}
        else:
            engine = OPENAI if self.api == OPENAI else "http"
            options = {name: getattr(self, name) for name in ("url", "kv_events", "kv_replay", "api_key_file")}
        return (
            *("--worker-id", self.name, "--engine", engine),
            *("--engine-args", json.dumps({name: value for name, value in options.items() if value})),
            *(("--model", self.model) if self.model else ()),
            *(("--block-size", str(self.block_size)) if self.block_size else ()),
        )


class EngineRegistry(Protocol):
    """Where the list of running servers comes from."""

    def entries(self) -> Sequence[EngineEntry]:
        """Returns the current servers; blocks.

        Raises:
            BadRegistry: the list is invalid; RegistryUnavailable: it may be available later.
        """


def _name_problem(name: str) -> str:
    if _NAME.fullmatch(name) and len(name) <= MAX_NAME_LENGTH:
        return ""
    return f"is {quoted(name)}; use letters, digits, dots, dashes and underscores"


def _url_problem(url: str) -> str:
    if not url.startswith(GRPC):
        return url_problem(url)
    reachable = is_reachable(url.removeprefix(GRPC).rstrip("/"))
    return "" if reachable else f"is {quoted(url)}, expected {GRPC}host:port"


def _events_problem(endpoint: str) -> str:
    return "" if endpoint == NO_EVENTS else _endpoint_problem(endpoint)


def _endpoint_problem(endpoint: str) -> str:
    return endpoint_problem(endpoint) if endpoint else "must not be empty"


def _model_problem(model: str) -> str:
    try:
        ModelSpec.parse(model)
    except ValueError as error:
        return f"is {quoted(model)}: {error}"
    return ""


def between(low: int, high: int) -> Callable[[str], str]:
    """Returns a rule of a decimal number."""

    def problem(text: str) -> str:
        plain = text.isascii() and text.isdecimal() and len(text) <= len(str(high))
        return "" if plain and low <= int(text) <= high else f"is {quoted(text)}; it must be between {low} and {high}"

    return problem


PROBLEMS: Mapping[str, Callable[[str], str]] = {
    "name": _name_problem,
    "url": _url_problem,
    "kv_events": _events_problem,
    "kv_replay": _endpoint_problem,
    "api_key_file": lambda path: "" if path else "must not be empty",
    "model": _model_problem,
    "block_size": between(1, MAX_BLOCK),
    "api": lambda api: "" if api == OPENAI else f"is {quoted(api)}; use {OPENAI}, or leave it out for vLLM and SGLang",
}
"""For each field, a function that returns why a value is invalid, as the end of a sentence; empty if it is valid."""
