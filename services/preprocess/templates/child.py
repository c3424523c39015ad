"""The processes that run foreign templates: ``python -m services.preprocess.templates.child FD S CHARS MIB``.

The process started this way loads Jinja once and never runs a template. For each descriptor received on its control
socket it forks, which takes milliseconds. The fork lowers its own limits, sends its pid and then serves requests on
that descriptor sequentially until it ends. It has an empty environment and no other descriptors.

A request is `REQUEST`, a template and its variables as JSON; the template is omitted if the process already has it.
A reply is `REPLY` and the prompt as UTF-8, or an error as JSON.
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
"""Sizes of the template and of the variables, bytes; whether to only compile; digest of the template."""
REPLY = Struct("<IB")
"""Size of the content, bytes; and its kind, one of those below."""
HELLO, TEXT, ERROR, ENDS, UNKNOWN = range(5)
"""The pid; a prompt; an error; an error, after which this process ends; the omitted template is not cached."""

CACHED_CHARS = 1 << 20
"""Total characters of templates cached in compiled form, which takes about thirty times as much memory."""
ALARM_S = 2.0
"""Time after the limit at which a template's process ends itself, even without its parent."""
_FILES = 16


class TemplateCache:
    """The templates of this process by digest, evicted in LRU order."""

    def __init__(self) -> None:
        self._sources: OrderedDict[bytes, str] = OrderedDict()
        self._chars = 0

    def source(self, digest: bytes) -> str | None:
        """Returns the template with this digest; None if it is not cached."""
        source = self._sources.get(digest)
        if source is not None:
            self._sources.move_to_end(digest)
        return source

    def add(self, digest: bytes, source: str) -> None:
        """Adds a template."""
        self._chars += len(source)
        self._sources[digest] = source
        while self._chars > CACHED_CHARS and len(self._sources) > 1:
            _, oldest = self._sources.popitem(last=False)
            self._chars -= len(oldest)
            templates.compiled.cache_clear()


def answer(cache: TemplateCache, request: memoryview, limit_s: float, max_chars: int) -> tuple[int, bytes]:
    """Returns the kind and the content of the reply to one request."""
    source_size, _, only_compiled, digest = REQUEST.unpack_from(request)
    end = REQUEST.size + source_size
    try:
        source = cache.source(digest)
        if source is None:
            if not source_size:
                return UNKNOWN, b""
            source = str(request[REQUEST.size : end], "utf-8")
            templates.compiled(source)
            cache.add(digest, source)
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
    """Runs in the fork: serves requests until its connection ends."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, _FILES))
    _send(connection, HELLO, str(os.getpid()).encode())
    cache = TemplateCache()
    with connection.makefile("rb") as requests:
        while header := requests.read(REQUEST.size):
            source_size, variables_size, *_ = REQUEST.unpack(header)
            # The alarm's default action ends a hanging process even if the parent has exited.
            signal.setitimer(signal.ITIMER_REAL, limit_s + ALARM_S)
            body = requests.read(source_size + variables_size)
            kind, content = answer(cache, memoryview(header + body), limit_s, max_chars)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _send(connection, kind, content)
            if kind == ENDS:
                return


def _send(connection: socket.socket, kind: int, content: bytes) -> None:
    connection.sendall(REPLY.pack(len(content), kind) + content)


def _run_fork(control: socket.socket, connection: socket.socket, limits: tuple[float, int, int]) -> NoReturn:
    """Serves the connection and exits; never returns to the parent's code."""
    try:
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _serve(connection, *limits)
    finally:
        os._exit(0)


def main(arguments: list[str]) -> None:
    """Forks processes until the control socket ends.

    Args:
        arguments: descriptor of the control socket; maximum run time of a template, seconds; maximum length of its
            output, characters; address space of a fork, MiB.
    """
    control = socket.socket(fileno=int(arguments[0]))
    limits = float(arguments[1]), int(arguments[2]), int(arguments[3])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap exited forks automatically
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
                _run_fork(control, connection, limits)


if __name__ == "__main__":
    main(sys.argv[1:])
