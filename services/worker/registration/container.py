"""Looks up the name of this container in the container engine's DNS server.

In a Docker network a container's host name is its id, and its hosts file maps its address to that id. The network's DNS
server maps the address to the container's name, which with Compose is ``PROJECT-SERVICE-INDEX``.
"""

from __future__ import annotations

import re
import secrets
import socket
import struct
from contextlib import suppress

CONTAINER_ID = re.compile(r"[0-9a-f]{12}")
NAME_SERVER = ("127.0.0.11", 53)
"""Address of Docker's DNS server inside every container of a user-defined network."""
TIMEOUT_S = 1.0

_HEADER = struct.Struct(">6H")
_RECORD = struct.Struct(">HHIH")
_POINTER, _INTERNET, _RECURSE, _ANSWER, _MAX_BYTES = 12, 1, 0x0100, 0x8000, 512


def container_name(server: tuple[str, int] = NAME_SERVER) -> str:
    """Returns the name of this container; empty when the DNS server is absent or has none. Blocks up to TIMEOUT_S."""
    with suppress(OSError, ValueError, IndexError, struct.error):
        address = socket.gethostbyname(socket.gethostname())
        query_id = secrets.randbits(16)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(server)  # a connected socket drops datagrams from other addresses
            connection.send(_query(query_id, address))
            return _first_label(connection.recv(_MAX_BYTES), query_id)
    return ""


def _query(query_id: int, address: str) -> bytes:
    """Returns a DNS query for the name of an IPv4 address."""
    labels = [*reversed(address.split(".")), "in-addr", "arpa"]
    name = b"".join(bytes([len(label)]) + label.encode() for label in labels) + b"\0"
    return _HEADER.pack(query_id, _RECURSE, 1, 0, 0, 0) + name + struct.pack(">2H", _POINTER, _INTERNET)


def _first_label(message: bytes, query_id: int) -> str:
    """Returns the first label of the name in a DNS response, without the network name; empty if there is no name."""
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
    """Returns the offset after a name, which ends with an empty label or a compression pointer."""
    while length := message[at]:
        if length >= 0xC0:
            return at + 2
        at += 1 + length
    return at + 1
