"""How others find this worker: the address it tells them, and its name."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from services.common.net.addresses import join
from services.worker.registration.container import CONTAINER_ID, container_name

ANY_HOST = ("", "0.0.0.0", "::", "*")


def advertised_address(listen: str, port: int, routers: Sequence[str]) -> str:
    """host:port where gateways reach a server.

    Args:
        listen: the address it listens on; for "every interface" the one that leads to the routers is taken.
        port: the port that was bound.
        routers: host:port each; may be empty.
    """
    host = listen.rpartition(":")[0].strip("[]")
    if host in ANY_HOST:
        host = _interface_towards(routers[0] if routers else "192.0.2.1:9")
    return join(host, port)


def default_worker_id(port: int, own_name: Callable[[], str] = container_name) -> str:
    """Host name and port: the same after a restart, so that the new process replaces the old one.

    Args:
        own_name: gives the name of this container, such as ``sluice-worker-1``, or an empty string; asked where the
            host name is a container's id.
    """
    host = socket.gethostname()
    if CONTAINER_ID.fullmatch(host):
        host = own_name() or host
    return f"{host}-{port}"


def _interface_towards(target: str) -> str:
    """This machine's address on the way to a target. Connecting a datagram socket chooses a route and sends nothing."""
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
