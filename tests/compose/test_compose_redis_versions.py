"""The router's store on the servers that people run: the contract of tests/unit/router on Redis and Valkey containers.

Every test of that contract runs again, on the published image where this machine has it or can pull it, else on a
stand-in made of Debian's package, with the same major version.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random

import pytest
from redis.asyncio import Redis
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer

from services.router.state.store.base import Store
from services.router.state.store.redis import RedisStore
from tests.support.servers import compose_suite
from tests.support.waiting import wait_until
from tests.unit.router.store import test_router_store as contract

pytestmark = pytest.mark.compose

IMAGES = {"redis": "redis:7", "valkey": "valkey/valkey:8"}
SERVER = {"redis": ("redis_version", "7."), "valkey": ("valkey_version", "8.")}
PORT = 6379

globals().update({name: test for name, test in vars(contract).items() if name.startswith("test_")})


@pytest.fixture(scope="module", params=IMAGES)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Name and URL of a server in a container of its own."""
    image, _ = compose_suite.available(IMAGES[request.param], request.param)
    assert image, f"{IMAGES[request.param]} can neither be pulled nor built"
    # Containers end with this fixture; the helper that ends forgotten ones is one image more to pull.
    testcontainers_config.ryuk_disabled = True
    with DockerContainer(image).with_exposed_ports(PORT) as container:
        port = int(container.get_exposed_port(PORT))  # of this machine's loopback, as in the other tests here
        _wait_for(port)
        yield request.param, f"redis://127.0.0.1:{port}/0"


def _wait_for(port: int) -> None:
    wait_until(lambda: _answers(port), 60)


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(7) == b"+PONG\r\n"
    except OSError:
        return False


@pytest.fixture
async def store(server: tuple[str, str], tmp_path: Path) -> AsyncIterator[Store]:
    """In place of the contract's own: on a container."""
    made = RedisStore(server[1], prefix=tmp_path.name, timeout_s=10, random=Random(1), feed_limit=100)
    await made.ping()
    yield made
    await made.close()


async def test_server_process_is_the_expected_one(server: tuple[str, str], store: Store) -> None:
    field, version = SERVER[server[0]]
    async with Redis.from_url(server[1]) as client:
        said = await client.info("server")
    assert str(said[field]).startswith(version)
