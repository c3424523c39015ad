"""The hosts of parsers in other processes, as extensions provide them: custom parsers and those of engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from services.common.base.errors import ErrorKind, SluiceError
from services.common.child_rpc.child import ChildLimits
from services.common.packages.extensions import PARSER_HOSTS, UnusableExtension, load_extension
from services.postprocess.detokenize.stream import Stream
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.remote import ParserPair, RemoteStream

OnDeath = Callable[[str, BaseException], None]
"""Called if a task that manages a process fails."""

CUSTOM, ENGINE = "custom", "engine"
"""The entry points: classes with the parameters of `custom_host` and of `engine_host`."""


class RemoteParserHost(Protocol):
    """Manages the process of a custom parser.

    Attributes:
        name: of the parser or engine.
        markers: special tokens that its parsers need in the text.
    """

    name: str
    markers: frozenset[str]

    @property
    def streams(self) -> int:
        """Number of open streams."""

    @property
    def pid(self) -> int:
        """Id of the running process; 0 for none."""

    def open(self, stream: Stream, names: ParserNames, context: ParserContext) -> RemoteStream:
        """Opens a stream that is parsed in the process."""

    async def start(self) -> None:
        """Starts the process; raises SluiceError if it does not start."""

    async def close(self) -> None:
        """Ends the process."""


class KeptTokens(Protocol):
    """What an engine's parsers need of the text.

    Attributes:
        keeps_special: whether special tokens stay in the text of a request with tools.
        keeps_special_always: the same for a request without tools.
    """

    @property
    def keeps_special(self) -> bool: ...

    @property
    def keeps_special_always(self) -> bool: ...


class EngineParsers(RemoteParserHost, Protocol):
    """Manages the processes of one engine's parsers."""

    def facts(self, pair: ParserPair) -> KeptTokens | None:
        """Returns the facts of a pair of parsers; None before it is loaded.

        Raises:
            SluiceError: FAILED_PRECONDITION if the engine cannot use them with this model.
        """

    async def prepare(self, pair: ParserPair) -> KeptTokens:
        """Loads a pair of parsers; raises SluiceError as `facts`, or UNAVAILABLE after a timeout."""

    def release(self, source: str) -> None:
        """Unloads the parsers of a removed model once its streams have ended."""


def custom_host(name: str, limits: ChildLimits, on_death: OnDeath | None) -> RemoteParserHost:
    """Returns the host of a custom parser, not started.

    Args:
        name: `module:Class`.
        limits: of the process; the time is that of one operation of a batch.

    Raises:
        SluiceError: FAILED_PRECONDITION without the extension.
    """
    host: RemoteParserHost = _class(CUSTOM, f"The custom parser {name}")(name, limits, on_death)
    return host


def engine_host(engine: str, python: str, limits: ChildLimits, on_death: OnDeath | None) -> EngineParsers:
    """Returns the host of an engine's parsers, not started; parameters and errors as of `custom_host`.

    Args:
        python: an interpreter that has its package; empty: this one.
    """
    host: EngineParsers = _class(ENGINE, f"The parsers of {engine}")(engine, python, limits, on_death)
    return host


def _class(name: str, subject: str) -> Any:
    missing = f"{subject} cannot be started: the extension services/postprocess/parsers/isolated is not installed."
    try:
        return load_extension(PARSER_HOSTS, name, missing)
    except UnusableExtension as error:
        raise SluiceError(ErrorKind.FAILED_PRECONDITION, str(error), code="missing_extra") from error
