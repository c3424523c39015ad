"""Options of the openai engine: where the server is, and its API key."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from services.common.base.errors import invalid
from services.common.net.addresses import join
from services.worker.engines.http.options import url_problem
from services.worker.engines.shared.arguments import read_options
from services.worker.settings import WorkerSettings

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class OpenAiOptions:
    """The --engine-args of the openai engine.

    Attributes:
        url: http(s)://host:port of the server, without /v1.
        api_key_file: file with the API key that the server requires; read again when it changes.
        start_s: timeout in seconds for the server to list its models.
        silent_s: seconds without a token and without a list of models after which a server counts as stopped; more than
            those of the http engine, because some servers answer nothing while they read a prompt.
    """

    url: str = ""
    api_key_file: str = ""
    start_s: float = 600.0
    silent_s: float = 30.0

    @property
    def address(self) -> str:
        """The host:port of the server."""
        parts = urlsplit(self.url)
        return join(parts.hostname or "", parts.port or _PORTS[parts.scheme])


def read_openai_options(settings: WorkerSettings) -> OpenAiOptions:
    """Parses --engine-args; raises SluiceError(INVALID_ARGUMENT) for invalid or unsupported options."""
    options = read_options(settings.engine_args, OpenAiOptions, "openai")
    if problem := url_problem(options.url):
        raise invalid(f"The option url of the openai engine {problem}.", param="engine_args")
    for name, seconds in (("start_s", options.start_s), ("silent_s", options.silent_s)):
        if seconds <= 0:
            raise invalid(
                f"The option {name} of the openai engine must be a positive number of seconds.", param="engine_args"
            )
    if settings.engine_flags:
        raise invalid("The openai engine starts no server, so it accepts no flags after --.", param="engine_args")
    for name, unset in (("role", settings.role == "aggregated"), ("adapters", not settings.adapters)):
        if not unset:
            raise invalid(f"The openai engine serves complete requests of one model; remove --{name}.", param=name)
    return options
