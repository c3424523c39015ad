"""The processes that run foreign templates: ``python -m services.preprocess.templates.child FD LIMITS CHARS``.

The fork server loads Jinja once and never runs a foreign template. Each fork lowers its own limits and then runs
templates sequentially. It has an empty environment and no other descriptors.

A request is the size of the template, the template, and its job as JSON (see `job`); no job to only compile it. A reply
is its kind, the size of its notes, the notes as JSON, and the prompt as UTF-8; or its kind and an error as JSON.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys
from collections.abc import Sequence
from struct import Struct
from typing import Any

import orjson

from services.common.base.errors import SluiceError
from services.common.child_rpc.child import Channel, ChildLimits, ForkedService, serve_forks
from services.preprocess.contract.validation import as_json
from services.preprocess.templates import templates
from services.preprocess.templates.capabilities import TemplateCapabilities
from services.preprocess.templates.turns import NOTES

SOURCE_SIZE = Struct("<I")
TEXT, ERROR, ENDS = b"\1", b"\2", b"\3"
"""A prompt; an error; an error, after which this process ends."""

CACHED_CHARS = 1 << 20
"""Total characters of templates cached in compiled form, which takes about thirty times as much memory."""
ALARM_S = 2.0
"""CPU time after the limit at which a template's process ends itself, even without its parent."""
REPEAT_S = 0.05
"""Interval at which a template that exceeded its limit is interrupted, until one interruption ends it."""


class TemplateCache:
    """Keeps the last template, and empties the cache of compiled ones before they take too much memory."""

    def __init__(self) -> None:
        self._chars = 0
        self._misses = 0
        self._encoded = b""
        self._source = ""

    def source(self, encoded: bytes) -> str:
        """Returns a template as text; the same object for a repeated one, whose hash Python keeps."""
        if encoded != self._encoded:
            self._encoded, self._source = encoded, str(encoded, "utf-8")
        return self._source

    def enforce(self, source: str) -> None:
        """Counts the template of the last request if it was compiled."""
        misses = templates.compiled.cache_info().misses
        if misses == self._misses:
            return
        self._chars, self._misses = self._chars + len(source), misses
        if self._chars > CACHED_CHARS:
            templates.compiled.cache_clear()
            self._chars = self._misses = 0


def answer_in_time(cache: TemplateCache, limit_s: float, max_chars: int, request: bytes) -> bytes:
    """Returns the reply to one request; interrupts a template after `limit_s`, except in a native call."""
    signal.setitimer(signal.ITIMER_PROF, limit_s + ALARM_S)  # the default action of this signal ends the process
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s, REPEAT_S)
        try:
            return answer(cache, limit_s, max_chars, request)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except templates.TemplateTimeout:
        signal.setitimer(signal.ITIMER_REAL, 0)
        return ERROR + _error(templates.took_too_long(limit_s))


def _interrupt(*_: Any) -> None:
    raise templates.TemplateTimeout


def answer(cache: TemplateCache, limit_s: float, max_chars: int, request: bytes) -> bytes:
    """Returns the reply to one request."""
    end = SOURCE_SIZE.size + SOURCE_SIZE.unpack_from(request)[0]
    source = cache.source(request[SOURCE_SIZE.size : end])
    try:
        if end == len(request):
            templates.compiled(source)
            return TEXT + _text("")
        variables, known, as_it_is = orjson.loads(request[end:])
        if as_it_is:
            return TEXT + _text(templates.probe(source, variables, limit_s, max_chars))
        shows = TemplateCapabilities.read(known) if known is not None else None
        return TEXT + _text(*templates.render(source, variables, limit_s, max_chars, shows))
    except SluiceError as error:
        return (ENDS if error.code == templates.OUT_OF_MEMORY else ERROR) + _error(error)
    except MemoryError:
        return ENDS + _error(templates.too_much_memory())
    finally:
        cache.enforce(source)


def job(variables: dict[str, Any], known: TemplateCapabilities | None, as_it_is: bool = False) -> bytes:
    """Returns the job of a request.

    Args:
        known: what the template shows; None: the process learns it if the conversation needs it.
        as_it_is: render the conversation as it is, for a probe.
    """
    return as_json((variables, known and known.as_json(), as_it_is))


def _text(text: str, notes: Sequence[str] = ()) -> bytes:
    form = orjson.dumps(notes) if notes else b""
    return SOURCE_SIZE.pack(len(form)) + form + text.encode("utf-8", "replace")


def read_text(content: bytes) -> templates.RenderedText:
    """Returns the prompt of a reply; a process compromised by a template may send anything."""
    if len(content) < SOURCE_SIZE.size:
        return templates.RenderedText("")
    end = SOURCE_SIZE.size + SOURCE_SIZE.unpack_from(content)[0]
    notes: Any = ()
    if end > SOURCE_SIZE.size:
        try:
            notes = orjson.loads(content[SOURCE_SIZE.size : end])
        except ValueError:
            notes = ()
    notes = tuple(note for note in NOTES if note in notes) if isinstance(notes, list) else ()
    return templates.RenderedText(content[end:].decode("utf-8", "replace"), notes)


def _error(error: SluiceError) -> bytes:
    return orjson.dumps({"message": error.message, "param": error.param, "code": error.code})


class TemplateService(ForkedService):
    """Runs templates.

    Args:
        limits: of a fork; the time is that of a template.
        max_chars: maximum length of its output.
    """

    def __init__(self, limits: ChildLimits, max_chars: int) -> None:
        super().__init__(limits)
        self._max_chars = max_chars
        self._cache = TemplateCache()

    def handle(self, request: bytes) -> bytes:
        return answer_in_time(self._cache, self.limits.call_s, self._max_chars, request)

    def is_last(self, reply: bytes) -> bool:
        return reply.startswith(ENDS)

    def serve(self, channel: Channel) -> None:
        signal.signal(signal.SIGALRM, _interrupt)
        super().serve(channel)


def main(control_fd: str, limits: str, max_chars: str) -> None:
    """Runs the fork server."""
    service = TemplateService(ChildLimits.read(limits), int(max_chars))
    variables: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    templates.render(source, variables, service.limits.call_s, int(max_chars))
    gc.collect()
    gc.freeze()
    serve_forks(socket.socket(fileno=int(control_fd)), service)


if __name__ == "__main__":
    main(*sys.argv[1:])
