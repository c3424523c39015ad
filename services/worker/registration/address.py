"""The advertised address and the default id of a worker."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from services.common.net.addresses import join
from services.worker.registration.container import CONTAINER_ID, container_name

ANY_HOST = ("", "0.0.0.0", "::", "*")


def advertised_address(listen: str, port: int, routers: Sequence[str]) -> str:
    """Returns the host:port at which gateways reach a server.

    Args:
        listen: the address the server listens on; a wildcard host is replaced by the interface towards the routers.
        port: the bound port.
        routers: host:port of each router; may be empty.
    """
    host = listen.rpartition(":")[0].strip("[]")
    if host in ANY_HOST:
        host = _interface_towards(routers[0] if routers else "192.0.2.1:9")
    return join(host, port)


def default_worker_id(port: int, own_name: Callable[[], str] = container_name) -> str:
    """Returns host name and port, which stay the same after a restart, so that the new process replaces the old one.

    Args:
        own_name: returns the name of this container, such as ``sluice-worker-1``, or an empty string; called when the
            host name is a container id.
    """
    host = socket.gethostname()
    if CONTAINER_ID.fullmatch(host):
        host = own_name() or host
    return f"{host}-{port}"


def _interface_towards(target: str) -> str:
    """Returns the local address of the route to a target; connecting a datagram socket sends no packet."""
    host, _, port = target.rpartition(":")
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return _own_address()


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
