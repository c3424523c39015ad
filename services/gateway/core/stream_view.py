"""What the links to workers and postprocess replicas need of a stream, whose state is in `streams`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, Protocol

from opentelemetry.trace import Span
from typing_extensions import TypeVar

from services.gateway.core.request import GenerationRequest, TokenizedPrompt


@dataclass(slots=True)
class Sent:
    """How much output of a stream, apart from content, has been sent to its client.

    Attributes:
        reasoning: code points of reasoning.
        calls: code points of arguments, by index of each started tool call.
        tokens: tokens sent with their bytes.
    """

    reasoning: int = 0
    calls: dict[int, int] = field(default_factory=dict)
    tokens: int = 0


class StreamView(Protocol):
    """A stream as a link sees it.

    Attributes:
        slot: its number on its links.
        tokens: all tokens generated so far.
        computed: whether prefill has completed on any worker.
        text_sent: code points of content passed to the sink.
        sent: other output passed to the sink.
    """

    slot: int
    request: GenerationRequest
    prompt: TokenizedPrompt
    max_tokens: int
    tokens: array[int]
    computed: bool
    text_sent: int
    sent: Sent

    @property
    def request_id(self) -> str:
        """Id of this choice, independent of its worker."""

    @property
    def seed(self) -> int | None:
        """Seed of this choice."""

    @property
    def current_span(self) -> Span | None:
        """Parent span for the services that currently process the stream."""


S = TypeVar("S", bound=StreamView, default=Any)
"""The streams of a link; the gateway's are `streams.stream.GenerationStream`."""
S_contra = TypeVar("S_contra", bound=StreamView, contravariant=True, default=Any)
