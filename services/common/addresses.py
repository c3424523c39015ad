"""host:port, as settings, flags and name services have it."""

from __future__ import annotations

from ipaddress import ip_address

HIGHEST_PORT = 65535


def host_port(address: str) -> tuple[str, int] | None:
    """The host, without an IPv6 address's brackets, and the port; None when it is no host:port."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > HIGHEST_PORT:
        return None
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone: localhost or a loopback address, without brackets."""
    try:
        return host.lower() == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def join(host: str, port: int) -> str:
    """host:port, brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
