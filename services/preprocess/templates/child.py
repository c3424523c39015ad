"""The processes that foreign templates run in: ``python -m services.preprocess.templates.child FD S CHARS MIB``.

The process that is started this way loads Jinja once and never runs a template. For each descriptor that it receives on
its control socket it makes a copy of itself, which takes milliseconds. The copy lowers its own limits, sends its pid
and then answers requests on that descriptor, one after the other, until it ends. It has an empty environment and no
other descriptors.

A request is `REQUEST`, a template and JSON of its variables; the template is left out where the process has it already.
A reply is `REPLY` and the prompt as UTF-8, or JSON of an error.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
from collections import OrderedDict
from struct import Struct
from typing import Any, NoReturn

import orjson

from services.common.errors import SluiceError
from services.preprocess.templates import templates

REQUEST = Struct("<II?16s")
"""Bytes of the template and of the variables; whether the template is only compiled; digest of the template."""
REPLY = Struct("<IB")
"""Bytes that follow, and which of the kinds below they are."""
HELLO, TEXT, ERROR, ENDS, UNKNOWN = range(5)
"""The pid; a prompt; an error; an error, after which this process ends; the template was left out and is not here."""

KEPT_CHARS = 1 << 20
"""Characters of the templates that are kept compiled, which takes some thirty times as much memory."""
ALARM_S = 2.0
"""How much longer than its limit a template may run before the process ends by itself, parent or not."""
_FILES = 16


class Known:
    """The templates of this process by digest; the least recently used is forgotten first."""

    def __init__(self) -> None:
        self._sources: OrderedDict[bytes, str] = OrderedDict()
        self._chars = 0

    def source(self, digest: bytes) -> str | None:
        """The template with this digest; None where it is not here."""
        source = self._sources.get(digest)
        if source is not None:
            self._sources.move_to_end(digest)
        return source

    def add(self, digest: bytes, source: str) -> None:
        """Keeps one more."""
        self._chars += len(source)
        self._sources[digest] = source
        while self._chars > KEPT_CHARS and len(self._sources) > 1:
            _, oldest = self._sources.popitem(last=False)
            self._chars -= len(oldest)
            templates.compiled.cache_clear()


def answer(known: Known, request: memoryview, limit_s: float, max_chars: int) -> tuple[int, bytes]:
    """The kind and the content of the reply to one request."""
    source_size, _, only_compiled, digest = REQUEST.unpack_from(request)
    end = REQUEST.size + source_size
    try:
        source = known.source(digest)
        if source is None:
            if not source_size:
                return UNKNOWN, b""
            source = str(request[REQUEST.size : end], "utf-8")
            templates.compiled(source)
            known.add(digest, source)
        if only_compiled:
            return TEXT, b""
        text = templates.render(source, orjson.loads(request[end:]), limit_s, max_chars)
        return TEXT, text.encode("utf-8", "replace")
    except SluiceError as error:
        return (ENDS if error.code == templates.OUT_OF_MEMORY else ERROR), _error(error)
    except MemoryError:
        return ENDS, _error(templates.too_much_memory())


def _error(error: SluiceError) -> bytes:
    return orjson.dumps({"kind": int(error.kind), "message": error.message, "param": error.param, "code": error.code})


def _serve(connection: socket.socket, limit_s: float, max_chars: int, memory_mb: int) -> None:
    """The copy: answers until its connection ends."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, _FILES))
    _send(connection, HELLO, str(os.getpid()).encode())
    known = Known()
    with connection.makefile("rb") as requests:
        while header := requests.read(REQUEST.size):
            source_size, variables_size, *_ = REQUEST.unpack(header)
            # Even if the parent is gone: the alarm's default action ends the process, whatever the template does.
            signal.setitimer(signal.ITIMER_REAL, limit_s + ALARM_S)
            body = requests.read(source_size + variables_size)
            kind, content = answer(known, memoryview(header + body), limit_s, max_chars)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _send(connection, kind, content)
            if kind == ENDS:
                return


def _send(connection: socket.socket, kind: int, content: bytes) -> None:
    connection.sendall(REPLY.pack(len(content), kind) + content)


def _copy(control: socket.socket, connection: socket.socket, limits: tuple[float, int, int]) -> NoReturn:
    """Never returns into the other's code."""
    try:
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _serve(connection, *limits)
    finally:
        os._exit(0)


def main(arguments: list[str]) -> None:
    """Makes copies until the control socket ends.

    Args:
        arguments: descriptor of the control socket; longest that a template may run, seconds; longest result,
            characters; address space of a copy, MiB.
    """
    control = socket.socket(fileno=int(arguments[0]))
    limits = float(arguments[1]), int(arguments[2]), int(arguments[3])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # copies that end leave nothing behind
    variables: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    templates.render("{% for m in messages %}{{ m | tojson }}{% endfor %}", variables, limits[0], limits[1])
    gc.collect()
    gc.freeze()
    control.sendall(b"\0")
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not request or not descriptors:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            if not os.fork():
                _copy(control, connection, limits)


if __name__ == "__main__":
    main(sys.argv[1:])
