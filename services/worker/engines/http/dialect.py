"""What the http engine needs of each kind of server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.common.base.errors import ErrorKind, SluiceError, check_name, internal, shortened
from services.worker.contract.engine import Load, Sink
from services.worker.contract.generation import GenerateRequest
from services.worker.engines.http.client import HttpClient

MAX_RANKS = 1_024
"""Data-parallel ranks, or publishers of KV events, that a server reports; with more the worker does not start."""
MAX_ADAPTERS = 1_024
"""Adapters that a server reports; with more the worker does not start."""
MAX_SOURCE = 1_024
"""Characters of the model's source that a server reports; with a longer one the worker does not start."""
MAX_NUMBER = (1 << 31) - 1
"""Size that a server reports, as messages have 32-bit numbers; with a larger one the worker does not start."""


@dataclass(frozen=True, slots=True)
class Publisher:
    """ZMQ endpoints of one rank's KV events; `replay` is empty if missed events cannot be requested."""

    rank: int
    endpoint: str
    replay: str = ""
    topic: str = ""


@dataclass(frozen=True, slots=True)
class Description:
    """What a server reports about itself. Zero and empty mean unknown.

    Attributes:
        model: name under which the server serves the base model.
        source: folder or hub id of the tokenizer's files.
        block_size: tokens per KV-cache block, or per page.
        total_blocks: blocks per rank.
        ranks: number of data-parallel ranks.
        publishers: endpoints of the KV events by rank; empty if the server does not report them.
    """

    version: str
    model: str
    source: str
    context_length: int
    block_size: int = 0
    total_blocks: int = 0
    max_sequences: int = 0
    ranks: int = 1
    capabilities: frozenset[str] = frozenset()
    accepted: frozenset[str] = frozenset()
    adapters: tuple[str, ...] = ()
    publishers: tuple[Publisher, ...] = ()

    def __post_init__(self) -> None:
        """Checks what the server chose.

        Raises:
            SluiceError: INVALID_ARGUMENT for a name that is too long or not printable; INTERNAL for a size out of
                range.
        """
        check_name(self.model, "The model's name on the engine's server")
        check_name(self.source, "The model's source on the engine's server", MAX_SOURCE)
        for adapter in self.adapters:
            check_name(adapter, "An adapter's name on the engine's server")
        sizes = {
            "context length": self.context_length,
            "block size": self.block_size,
            "number of blocks": self.total_blocks,
            "number of sequences": self.max_sequences,
        }
        for name, size in sizes.items():
            if not 0 <= size <= MAX_NUMBER:
                raise internal(f"The {name} of the engine's server is {shortened(str(size))}, out of range.")
        for name, count, most in (
            ("ranks", self.ranks, MAX_RANKS),
            ("publishers of KV events", len(self.publishers), MAX_RANKS),
            ("adapters", len(self.adapters), MAX_ADAPTERS),
        ):
            if count > most:
                raise internal(f"The engine's server reports {count} {name}; at most {most} are supported.")


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One generation as an HTTP request."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


class EventReader(Protocol):
    """Reads the events of one generation into a sink; usage is the server's own.

    Attributes:
        ended: whether the sink has finished.
        finishing: whether all tokens have arrived, and only the usage is missing.
    """

    ended: bool

    @property
    def finishing(self) -> bool:
        """See the class."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Processes one event; raises SluiceError for an error that the server reports."""

    def close(self) -> None:
        """Processes the end of the stream; raises SluiceError when the generation has not finished."""


class Dialect(ABC):
    """The HTTP API of one kind of server.

    Attributes:
        NAME: as in the engine's name on the model card.
        ALIVE: path that responds at once while the server runs.
        COUNTS_COPIES: as in `Translator`.
    """

    NAME: str
    ALIVE: str
    COUNTS_COPIES: bool

    @abstractmethod
    async def describe(self, client: HttpClient) -> Description:
        """Returns what the server reports; raises SluiceError when that does not suffice."""

    @abstractmethod
    def call(self, request: GenerateRequest, request_id: str) -> GenerateCall:
        """Returns the HTTP request of a generation.

        Raises:
            SluiceError: INVALID_ARGUMENT for an option that callers must not set.
        """

    @abstractmethod
    def reader(self, request: GenerateRequest, sink: Sink) -> EventReader:
        """Returns the reader of a generation's events."""

    @abstractmethod
    async def loads(self, client: HttpClient) -> Sequence[Load]:
        """Returns the server's load by rank; empty if it reports none."""

    @abstractmethod
    async def clear_cache(self, client: HttpClient) -> None:
        """Clears the prefix cache; raises SluiceError(FAILED_PRECONDITION) when the server cannot."""

    async def abort(self, client: HttpClient, request_id: str) -> None:
        """Aborts a generation whose connection was closed, if the server does not notice that by itself."""
        return


def incomplete() -> SluiceError:
    """Returns the error of a stream that ended without a finish reason."""
    return SluiceError(
        ErrorKind.STREAM_INCOMPLETE, "The engine's server ended the stream without a finish reason; retry."
    )
