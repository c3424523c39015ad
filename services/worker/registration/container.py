"""The name of the container that this process runs in, as its engine's name server has it.

In a Docker network a container's host name is its id, and its own hosts file maps its address back to that id. The
network's name server maps the address to the container's name, which with Compose is ``PROJECT-SERVICE-INDEX``.
"""

from __future__ import annotations

import re
import secrets
import socket
import struct
from contextlib import suppress

CONTAINER_ID = re.compile(r"[0-9a-f]{12}")
NAME_SERVER = ("127.0.0.11", 53)
"""Where Docker's name server listens inside every container of a user-defined network."""
ANSWER_WITHIN_S = 1.0

_HEADER = struct.Struct(">6H")
_RECORD = struct.Struct(">HHIH")
_POINTER, _INTERNET, _RECURSE, _ANSWER, _LONGEST = 12, 1, 0x0100, 0x8000, 512


def container_name(server: tuple[str, int] = NAME_SERVER) -> str:
    """The name of this container; empty when the name server is absent or has none. Blocks for a second at most."""
    with suppress(OSError, ValueError, IndexError, struct.error):
        address = socket.gethostbyname(socket.gethostname())
        query_id = secrets.randbits(16)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.settimeout(ANSWER_WITHIN_S)
            asking.connect(server)  # answers of others are not received
            asking.send(_question(query_id, address))
            return _first_label(asking.recv(_LONGEST), query_id)
    return ""


def _question(query_id: int, address: str) -> bytes:
    """A DNS query for the name of an IPv4 address."""
    labels = [*reversed(address.split(".")), "in-addr", "arpa"]
    name = b"".join(bytes([len(label)]) + label.encode() for label in labels) + b"\0"
    return _HEADER.pack(query_id, _RECURSE, 1, 0, 0, 0) + name + struct.pack(">2H", _POINTER, _INTERNET)


def _first_label(message: bytes, query_id: int) -> str:
    """The first label of the name in an answer, without the network's; empty for an answer without a name."""
    found_id, flags, questions, answers, *_ = _HEADER.unpack_from(message)
    if found_id != query_id or not flags & _ANSWER or questions != 1 or answers < 1:
        return ""
    at = _end_of_name(message, _HEADER.size) + 4
    at = _end_of_name(message, at)
    kind, _, _, _ = _RECORD.unpack_from(message, at)
    at += _RECORD.size
    length = message[at]
    label = message[at + 1 : at + 1 + length].decode("ascii")
    return label if kind == _POINTER and length < 64 and label.isprintable() else ""


def _end_of_name(message: bytes, at: int) -> int:
    """Where a name ends: after its empty label, or after a reference to an earlier name."""
    while length := message[at]:
        if length >= 0xC0:
            return at + 2
        at += 1 + length
    return at + 1
