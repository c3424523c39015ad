"""host:port, as settings, flags and name services have it."""

from __future__ import annotations

import ipaddress
import re

HIGHEST_PORT = 65535
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


def host_port(address: str) -> tuple[str, int] | None:
    """The host, without an IPv6 address's brackets, and the port; None when it is no host:port."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > HIGHEST_PORT:
        return None
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone: localhost or a loopback address, without brackets."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listens_on_loopback(address: str) -> bool:
    """Whether a server that listens on host:port is reachable from this machine only."""
    place = host_port(address)
    return place is not None and is_loopback(place[0])


def is_reachable(address: str) -> bool:
    """Whether an address is a host's name or IP and a port: nothing that gRPC would take for a socket file, or for the
    name of a resolver."""
    place = host_port(address)
    if place is None or not place[1]:
        return False
    if not address.startswith("["):
        return _NAME.fullmatch(place[0]) is not None
    try:
        return ipaddress.ip_address(place[0]).version == 6
    except ValueError:
        return False


def join(host: str, port: int) -> str:
    """host:port, brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
