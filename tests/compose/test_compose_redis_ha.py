"""The profile redis-ha: the master dies under load, another takes over, and the dead one comes back as a replica."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from tests.support.clients.chat_load import ChatLoad
from tests.support.servers.compose_suite import Suite
from tests.support.waiting import wait_until

pytestmark = pytest.mark.compose

CLI = ("sh", "/etc/sluice/cli.sh")  # redis-cli with the password


def _master(suite: Suite, sentinel: str) -> str:
    """Address of the master, as a sentinel says."""
    return suite.execute(sentinel, *CLI, "-p", "26379", "sentinel", "masters").split("\nip\n")[1].split()[0]


def _written(suite: Suite, server: str) -> int:
    """How far the server's stream of writes is, bytes."""
    return int(suite.execute(server, *CLI, "info", "replication").split("master_repl_offset:")[1].split()[0])


def _docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def _address(container: str) -> str:
    return _docker("inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", container)


def _role(suite: Suite, container: str) -> str:
    return suite.execute(container, *CLI, "role").split()[0]


async def test_killed_redis_master_fails_no_request(suite: Suite) -> None:
    servers = suite.containers("redis") + suite.containers("redis-replica")
    sentinel = suite.containers("sentinel")[0]
    assert len(servers) == 3
    old_address = await asyncio.to_thread(_master, suite, sentinel)
    (old,) = [server for server in servers if _address(server) == old_address]
    async with ChatLoad(suite.url) as load:
        await load.more(32)
        await asyncio.to_thread(_docker, "kill", old)
        await asyncio.to_thread(wait_until, lambda: _master(suite, sentinel) != old_address)
        await load.more(64)
        new_address = await asyncio.to_thread(_master, suite, sentinel)
        (new,) = [server for server in servers if server != old and _address(server) == new_address]
        await asyncio.to_thread(wait_until, lambda: _role(suite, new) == "master")
        before = await asyncio.to_thread(_written, suite, new)
        await load.more(32)
        await asyncio.to_thread(wait_until, lambda: _written(suite, new) > before)
    assert load.failures == []
    assert "{sluice}:models" in suite.execute(new, *CLI, "keys", "{sluice}:*")

    await asyncio.to_thread(_docker, "start", old)
    await asyncio.to_thread(wait_until, lambda: _role(suite, old) == "slave")
    assert _role(suite, new) == "master"


def test_replaced_sentinel_learns_the_master_from_its_peers(suite: Suite) -> None:
    first, *_, last = suite.containers("sentinel")
    master = _master(suite, first)
    _docker("restart", "--time", "5", last)
    wait_until(lambda: _docker("inspect", "--format", "{{.State.Health.Status}}", last) == "healthy")
    assert _master(suite, last) == master
