"""A server of names, run as `python name_server.py HOST NAME=ADDRESS…`: it answers with the addresses that it is given.

Names that it does not know do not exist; there are no IPv6 addresses.
"""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PORT, TTL_S, MESSAGE_BYTES = 53, 1, 1500
A, NO_SUCH_NAME = 1, 3
READY_S = 20.0


def answer(query: bytes, addresses: Mapping[str, str]) -> bytes:
    """Returns the answer to a query of one question."""
    end, labels = 12, []
    while size := query[end]:
        labels.append(query[end + 1 : end + 1 + size].decode())
        end += 1 + size
    (kind,) = struct.unpack_from("!H", query, end + 1)
    address = addresses.get(".".join(labels).lower())
    found = address is not None and kind == A
    flags = 0x8580 | (0 if address else NO_SUCH_NAME)  # an answer with authority to who wants recursion
    head = query[:2] + struct.pack("!HHHHH", flags, 1, int(found), 0, 0)
    question = query[12 : end + 5]
    if not found or address is None:
        return head + question
    return head + question + struct.pack("!HHHIH", 0xC00C, A, 1, TTL_S, 4) + socket.inet_aton(address)


def serve(host: str, addresses: Mapping[str, str]) -> None:
    """Answers until the process is ended."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((host, PORT))
        while True:
            query, caller = server.recvfrom(MESSAGE_BYTES)
            try:
                server.sendto(answer(query, addresses), caller)
            except (IndexError, UnicodeDecodeError, struct.error, OSError):
                continue  # no query, or its caller is gone


class NameServer:
    """The server as a process of its own.

    Args:
        prefix: what it is run by.
    """

    def __init__(self, host: str, addresses: Mapping[str, str], prefix: Sequence[str]) -> None:
        self._host = host
        names = [f"{name}={address}" for name, address in addresses.items()]
        self._command = [*prefix, sys.executable, str(Path(__file__)), host, *names]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts it and waits until it answers."""
        self._process = subprocess.Popen(self._command)
        deadline = time.monotonic() + READY_S
        while not self._answers():
            assert time.monotonic() < deadline, f"the server of names did not start in {READY_S:.0f} s"

    def _answers(self) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(0.2)
            try:
                client.sendto(b"\0\1\1\0\0\1\0\0\0\0\0\0\0\0\1\0\1", (self._host, PORT))
                return bool(client.recv(MESSAGE_BYTES))
            except OSError:
                return False

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(20)


if __name__ == "__main__":
    serve(sys.argv[1], dict(pair.split("=", 1) for pair in sys.argv[2:]))
