"""What a request adds to its entry in the audit log, wherever it runs."""

from __future__ import annotations

from typing import Any, cast

from services.common.errors import SluiceError
from services.common.observability import audit
from services.common.observability.audit import AuditEntry
from services.gateway.core.request import Sink


def known(key: str) -> None:
    """Whose request it is: the public part of its API key."""
    entry = audit.current.get()
    if entry is not None:
        entry.key = key


def computing(worker: str) -> None:
    """A worker computes something of the request that is no stream."""
    entry = audit.current.get()
    if entry is not None:
        entry.worked_on_by(worker)


def embedded(model: str, prompt_tokens: int) -> None:
    """The request was for vectors, and they are made."""
    entry = audit.current.get()
    if entry is not None:
        entry.model, entry.prompt_tokens = model, prompt_tokens


def failed(error: SluiceError) -> None:
    """The request is answered with an error."""
    entry = audit.current.get()
    if entry is not None:
        entry.outcome = _word(error)


class StreamAudit:
    """What one choice of a request adds to its entry."""

    def __init__(self, entry: AuditEntry) -> None:
        self._entry = entry

    def began(self, request_id: str, model: str, prompt_tokens: int) -> None:
        """A choice of the request starts.

        Args:
            request_id: of the first prompt, where there are several.
            prompt_tokens: 0 for a further choice of the same prompt.
        """
        entry = self._entry
        entry.model = model
        entry.request_id = entry.request_id or request_id
        entry.prompt_tokens += prompt_tokens

    def worked_on_by(self, worker: str) -> None:
        """A worker takes it."""
        self._entry.worked_on_by(worker)

    def ended(self, output_tokens: int, cached_tokens: int, error: SluiceError | None, gone: bool) -> None:
        """It is over."""
        entry = self._entry
        entry.output_tokens += output_tokens
        entry.cached_tokens = max(entry.cached_tokens, cached_tokens)
        if error is not None:
            entry.outcome = _word(error)
        elif gone:
            entry.outcome = entry.outcome or "cancelled"

    def listening(self, sink: Sink) -> Sink:
        """The sink, or with content one that also keeps what it is told."""
        return cast("Sink", _Listening(sink, self._entry)) if self._entry.with_content else sink


class _Listening:
    """Passes everything on."""

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


def of_request() -> StreamAudit | None:
    """For a choice of the request being served; None while there is no audit log."""
    entry = audit.current.get()
    return None if entry is None else StreamAudit(entry)


def _word(error: SluiceError) -> str:
    return error.code or error.kind.name.lower()
