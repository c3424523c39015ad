"""Which hosts and addresses media files are fetched from."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

# Listed here because versions of Python differ; 192.88.99.0/24 are relays of 6to4.
_REFUSED_V4 = tuple(
    map(
        ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
            *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3"),
        ),
    )
)
_GLOBAL_UNICAST = ip_network("2000::/3")
_REFUSED_V6 = tuple(map(ip_network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))


class PublicAddresses:
    """Permits addresses of the public internet only."""

    def permits(self, address: str) -> bool:
        """Returns whether files may be fetched from an address, in the form in which sockets return it.

        IPv6 addresses that contain an IPv4 one (mapped, 6to4, Teredo, NAT64) are refused, whatever they contain.
        """
        try:
            found = ip_address(address.partition("%")[0])
        except ValueError:
            return False
        if "%" in address or found.is_multicast or not found.is_global:
            return False
        if isinstance(found, IPv6Address):
            return found in _GLOBAL_UNICAST and not any(found in network for network in _REFUSED_V6)
        return _is_ordinary(found)


def _is_ordinary(address: IPv4Address) -> bool:
    return not (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_reserved
        or address.is_unspecified
        or any(address in network for network in _REFUSED_V4)
    )


class AllowedHosts:
    """An allow-list of hosts.

    Args:
        entries: each HOST or *.DOMAIN, which stands for all names below the domain, with :PORT unless that is 443; "*"
            stands for all hosts.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._exact: set[tuple[str, int]] = set()
        self._below: list[tuple[str, int]] = []
        for entry in entries:
            host, port = _read_entry(entry)
            if host.startswith("*"):
                self._below.append((host[1:], port))
            else:
                self._exact.add((host, port))

    def __bool__(self) -> bool:
        return bool(self._exact or self._below)

    def permits(self, host: str, port: int) -> bool:
        """Returns whether a host, in lower case and without a final dot, is listed."""
        return (host, port) in self._exact or any(
            port == number and host.endswith(end) and len(host) > len(end) for end, number in self._below
        )


def _read_entry(entry: str) -> tuple[str, int]:
    """Returns host and port of an entry; raises ValueError for a malformed one."""
    host, _, port = entry.strip().lower().rstrip(".").partition(":")
    wild = host.removeprefix("*")
    if wild != host and wild and not wild.startswith("."):
        raise ValueError(f"media host {entry!r} has a * that is not the whole first label")
    if not host or "*" in wild or "/" in host or not host.isascii() or (port and not port.isdigit()):
        raise ValueError(f"media host {entry!r} is not HOST, *.DOMAIN or *, each with an optional :PORT")
    return host, int(port or 443)
