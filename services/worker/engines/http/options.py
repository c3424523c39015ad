"""Options of the http engine: where the server is, and where it publishes its KV events."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from services.common.base.errors import SluiceError, invalid, quoted
from services.common.net.addresses import is_reachable, join
from services.worker.engines.shared.arguments import read_options
from services.worker.settings import WorkerSettings

NO_EVENTS = "off"
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """The --engine-args of the http engine.

    Attributes:
        url: http(s)://host:port of the server.
        kv_events: ZMQ endpoint of rank 0's KV events; empty: as the server reports it; "off": do not subscribe.
        kv_replay: ZMQ endpoint from which rank 0's missed events are requested; empty: as the server reports it.
        api_key_file: file with the API key that the server requires; read again when it changes.
        start_s: timeout in seconds for the server to become healthy.
        silent_s: seconds without a token and without an answer to the probe after which a server counts as stopped.
    """

    url: str = ""
    kv_events: str = ""
    kv_replay: str = ""
    api_key_file: str = ""
    start_s: float = 600.0
    silent_s: float = 8.0

    @property
    def address(self) -> str:
        """The host:port of the server."""
        parts = urlsplit(self.url)
        return join(parts.hostname or "", parts.port or _PORTS[parts.scheme])


def read_http_options(settings: WorkerSettings) -> HttpOptions:
    """Parses --engine-args; raises SluiceError(INVALID_ARGUMENT) for invalid or unsupported options."""
    options = read_options(settings.engine_args, HttpOptions, "http")
    if problem := url_problem(options.url):
        raise _invalid(f"The option url of the http engine {problem}.")
    for name in ("kv_events", "kv_replay"):
        value = getattr(options, name)
        if (name, value) != ("kv_events", NO_EVENTS) and (problem := endpoint_problem(value)):
            raise _invalid(f"The option {name} of the http engine {problem}.")
    if options.kv_replay and (not options.kv_events or options.kv_events == NO_EVENTS):
        raise _invalid("The option kv_replay of the http engine needs the option kv_events.")
    if options.start_s <= 0:
        raise _invalid("The option start_s of the http engine must be a positive number of seconds.")
    if options.silent_s <= 0:
        raise _invalid("The option silent_s of the http engine must be a positive number of seconds.")
    if settings.engine_flags:
        raise _invalid("The http engine starts no server, so it accepts no flags after --.")
    if settings.role != "aggregated":
        raise invalid("The http engine serves complete requests; remove --role.", param="role")
    if settings.adapters:
        raise invalid("The http engine lists the server's own adapters; remove --adapters.", param="adapters")
    return options


def url_problem(url: str) -> str:
    """Returns why a URL of a server is invalid, as the end of a sentence; empty if it is valid."""
    if not url:
        return "is missing; set it to http://host:port"
    try:
        parts = urlsplit(url)
        address = join(parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0))
    except ValueError:
        return f"is {quoted(url)}, expected http://host:port"
    if parts.username is not None or parts.password is not None:
        return "contains credentials; use api_key_file"
    if (
        parts.scheme not in _PORTS
        or parts.path.strip("/")
        or parts.query
        or parts.fragment
        or not is_reachable(address)
    ):
        return f"is {quoted(url)}, expected http://host:port"
    return ""


def endpoint_problem(endpoint: str) -> str:
    """Returns why a ZMQ endpoint is invalid, as the end of a sentence; empty if it is valid or empty."""
    if not endpoint or (endpoint.startswith("ipc://") and len(endpoint) > len("ipc://")):
        return ""
    if endpoint.startswith("tcp://") and is_reachable(endpoint.removeprefix("tcp://")):
        return ""
    return f"is {quoted(endpoint)}, expected tcp://host:port or ipc://path"


def _invalid(message: str) -> SluiceError:
    return invalid(message, param="engine_args")
