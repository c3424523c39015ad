"""Runs templates that clients sent in processes that can be killed.

A hostile template can spin, recurse or eat memory inside a single expression, where no check reaches it. So it runs in
a process with an address-space limit, an empty environment, an alarm of its own, and a parent that kills it.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import subprocess
import sys
from queue import Empty, LifoQueue
from struct import Struct
from time import monotonic
from typing import Any

import orjson

from services.common.errors import ErrorKind, SluiceError, invalid, overloaded
from services.preprocess import templates
from services.preprocess.validate import as_json

_LENGTH = Struct("<I")
_GRACE_S = 1.0
_START_S = 15.0


class TemplateProcesses:
    """Up to `count` processes, started when first needed and replaced when killed.

    Args:
        count: how many templates may run at once.
        limit_s: longest that one may run, seconds.
        max_chars: longest result of one.
        memory_mb: address space of a process, MiB.
    """

    def __init__(self, count: int, limit_s: float, max_chars: int, memory_mb: int) -> None:
        self._limit_s = limit_s
        self._max_chars = max_chars
        self._memory_mb = memory_mb
        self._idle: LifoQueue[_Process | None] = LifoQueue()
        for _ in range(count):
            self._idle.put(None)

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """Runs a template; blocks for at most a few times the limit.

        Raises:
            SluiceError: as `templates.render`; OVERLOADED when all processes stay busy.
        """
        request = as_json(
            {"source": source, "variables": variables, "limit_s": self._limit_s, "max_chars": self._max_chars}
        )
        try:
            process = self._idle.get(timeout=self._limit_s + _GRACE_S)
        except Empty:
            raise overloaded("Too many chat templates of clients are running.") from None
        try:
            process = self._running(process)
            reply = orjson.loads(process.exchange(request, monotonic() + self._limit_s + _GRACE_S))
        except TimeoutError:
            _discard(process)
            raise templates.took_too_long(self._limit_s) from None
        except (OSError, EOFError, orjson.JSONDecodeError):
            _discard(process)
            raise invalid("The chat template needs too much time or memory.", param="chat_template") from None
        finally:
            self._idle.put(process)
        if "text" in reply:
            return str(reply["text"])
        raise SluiceError(ErrorKind(reply["kind"]), reply["message"], param=reply["param"])

    def _running(self, process: _Process | None) -> _Process:
        if process is not None and process.alive:
            return process
        _discard(process)
        fresh = _Process(self._memory_mb)
        try:
            fresh.exchange(b"", monotonic() + _START_S)  # its imports must not count against the template
        except (OSError, EOFError):
            fresh.kill()
            raise SluiceError(ErrorKind.INTERNAL, "No process for chat templates can be started.") from None
        return fresh

    def close(self) -> None:
        """Ends the processes that are idle; one that is busy ends by its own alarm or with its pipe."""
        while True:
            try:
                _discard(self._idle.get_nowait())
            except Empty:
                return


def _discard(process: _Process | None) -> None:
    if process is not None:
        process.kill()


class _Process:
    """One child with a request and a reply at a time, each a length and as many bytes."""

    def __init__(self, memory_mb: int) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
            start_new_session=True,
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._stdin, self._stdout = self._child.stdin, self._child.stdout
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def exchange(self, request: bytes, deadline: float) -> bytes:
        """Sends a request and returns the reply; TimeoutError at the deadline, EOFError or OSError when it died."""
        unsent = memoryview(_LENGTH.pack(len(request)) + request)
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdin, selectors.EVENT_WRITE)
            while unsent:
                _wait(selector, deadline)
                unsent = unsent[os.write(self._stdin.fileno(), unsent) :]
            selector.unregister(self._stdin)
            selector.register(self._stdout, selectors.EVENT_READ)
            (size,) = _LENGTH.unpack(self._receive(selector, _LENGTH.size, deadline))
            return self._receive(selector, size, deadline)

    def _receive(self, selector: selectors.BaseSelector, size: int, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < size:
            _wait(selector, deadline)
            piece = os.read(self._stdout.fileno(), size - len(received))
            if not piece:
                raise EOFError
            received += piece
        return bytes(received)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        self._stdin.close()
        self._stdout.close()


def _wait(selector: selectors.BaseSelector, deadline: float) -> None:
    if not selector.select(max(0.0, deadline - monotonic())):
        raise TimeoutError


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        text = templates.render(request["source"], request["variables"], request["limit_s"], request["max_chars"])
        return {"text": text.encode("utf-8", "replace").decode()}
    except SluiceError as error:
        return {"kind": int(error.kind), "message": error.message, "param": error.param}


def main() -> None:
    """The child: answers until its standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]) << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    while header := requests.read(_LENGTH.size):
        data = requests.read(_LENGTH.unpack(header)[0])
        request = orjson.loads(data) if data else None
        reply = b""
        if request is not None:
            # Even if the parent is gone: the alarm's default action ends the process, whatever the template does.
            signal.setitimer(signal.ITIMER_REAL, request["limit_s"] + 2 * _GRACE_S)
            reply = orjson.dumps(_answer(request))
            signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(_LENGTH.pack(len(reply)) + reply)
        replies.flush()


if __name__ == "__main__":
    main()
