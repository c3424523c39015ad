"""A server that answers scripts as a test says: with errors, with silence, or by hanging up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hiredis import Reader

HANG_UP = b"hang up"
SILENCE = b"silence"


class ScriptedRedis:
    """One server, or all there is of a cluster or of a master with sentinels.

    Args:
        good: the reply to a script when nothing else is planned, in the protocol of Redis.

    Attributes:
        plan: what the next scripts are answered with, in order; a hang-up and silence are replies too.
        scripts: number of scripts received.
        role: what it says it is.
    """

    def __init__(self, good: bytes) -> None:
        self.good = good
        self.plan: list[bytes] = []
        self.scripts = 0
        self.searches = 0
        self.role = "master"

    async def __aenter__(self) -> ScriptedRedis:
        self._writers: list[asyncio.StreamWriter] = []
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()

    def url(self, topology: str) -> str:
        """For settings."""
        here = f"127.0.0.1:{self.port}"
        return {
            "single": f"redis://{here}/0",
            "sentinel": f"redis+sentinel://{here}/main/0",
            "cluster": f"redis+cluster://{here}",
        }[topology]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        commands = Reader()
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                commands.feed(data)
                while (command := commands.gets()) is not False:
                    reply = self._reply([part.decode(errors="replace") for part in command])
                    if reply == HANG_UP:
                        writer.close()
                        return
                    if reply != SILENCE:
                        writer.write(reply)

    def _reply(self, command: list[str]) -> bytes:
        name, *rest = command
        if name.upper() in ("EVALSHA", "EVAL"):
            self.scripts += 1
            return self.plan.pop(0) if self.plan else self.good
        answers: dict[str, Callable[[], bytes]] = {
            "SENTINEL": lambda: self._sentinel(rest[0].upper()),
            "CLUSTER": lambda: self._cluster(rest[0].upper()),
            "ROLE": lambda: encoded([self.role, 0, []]),
        }
        return answers.get(name.upper(), lambda: b"+OK\r\n")()

    def _sentinel(self, question: str) -> bytes:
        self.searches += question == "MASTER"
        if question == "MASTER":
            return encoded(["config-epoch", "1"])
        return encoded(["127.0.0.1", str(self.port)] if question == "GET-MASTER-ADDR-BY-NAME" else [])

    def _cluster(self, question: str) -> bytes:
        self.searches += question == "SLOTS"
        if question == "INFO":
            return encoded("cluster_state:ok\r\ncluster_current_epoch:1\r\n")
        return encoded([[0, 16_383, ["127.0.0.1", self.port, "a" * 40]]])


def encoded(value: Any) -> bytes:
    """Returns a text, a number or a list as Redis sends it."""
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, str):
        return b"$%d\r\n%s\r\n" % (len(value), value.encode())
    return b"*%d\r\n" % len(value) + b"".join(map(encoded, value))
