"""Records streams in the audit log entries of their requests."""

from __future__ import annotations

from typing import Any, cast

from services.common.observability.audit import AuditEntry
from services.gateway.core.request import Sink
from services.gateway.streams.interfaces import StreamEnd
from services.gateway.streams.stream import GenerationStream


class AuditObserver:
    """Adds every stream to the audit log entry of its request; see StreamObserver."""

    def on_started(self, stream: GenerationStream) -> None:
        """Records model and prompt; choices of the same prompt count it once."""
        entry = stream.context.audit
        if entry is not None:
            entry.model = stream.model
            entry.request_id = entry.request_id or stream.request.request_id
            entry.prompt_tokens += 0 if stream.index else stream.prompt_tokens

    def on_assigned(self, stream: GenerationStream, worker_id: str) -> None:
        """Records the worker."""
        entry = stream.context.audit
        if entry is not None:
            entry.worked_on_by(worker_id)

    def on_ended(self, stream: GenerationStream, end: StreamEnd) -> None:
        """Records token counts, and the outcome unless the stream has finished."""
        entry = stream.context.audit
        if entry is None:
            return
        entry.output_tokens += stream.completion_tokens or len(stream.tokens)
        entry.cached_tokens = max(entry.cached_tokens, stream.cached_tokens)
        if end.error is not None:
            entry.outcome = end.outcome
        elif end.finish is None:
            entry.outcome = entry.outcome or end.outcome


def recorded(sink: Sink, entry: AuditEntry | None) -> Sink:
    """Returns the sink or, if the audit log includes content, one that also records the output in the entry."""
    return sink if entry is None or not entry.with_content else cast("Sink", _RecordingSink(sink, entry))


class _RecordingSink:
    """Forwards every call, and records the output."""

    def __init__(self, sink: Sink, entry: AuditEntry) -> None:
        self._sink = sink
        self._entry = entry

    def text(self, piece: str) -> None:
        self._entry.hear(piece)
        self._sink.text(piece)

    def reasoning(self, piece: str) -> None:
        self._entry.hear(piece)
        self._sink.reasoning(piece)

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        self._entry.hear(f"{name}{arguments}")
        self._sink.tool_call(call, call_id, name, arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)
