"""Parses and checks host:port addresses from settings, flags and name services."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

HIGHEST_PORT = 65535
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


def host_port(address: str) -> tuple[str, int] | None:
    """Returns the host, without IPv6 brackets, and the port; None when `address` is not host:port."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > HIGHEST_PORT:
        return None
    return host.strip("[]"), int(port)


@lru_cache(1024)
def is_loopback(host: str) -> bool:
    """Whether a host (without brackets) is localhost or a loopback address."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listens_on_loopback(address: str) -> bool:
    """Whether a server that listens on host:port is reachable only from this machine."""
    parsed = host_port(address)
    return parsed is not None and is_loopback(parsed[0])


def is_reachable(address: str) -> bool:
    """Whether an address is a host name or IP and a port, not a socket path or resolver URI that gRPC would accept."""
    parsed = host_port(address)
    if parsed is None or not parsed[1]:
        return False
    if not address.startswith("["):
        return _NAME.fullmatch(parsed[0]) is not None
    try:
        return ipaddress.ip_address(parsed[0]).version == 6
    except ValueError:
        return False


def join(host: str, port: int) -> str:
    """Returns host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
