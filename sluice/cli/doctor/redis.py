"""Checks Redis."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

from sluice.cli.doctor.finding import Finding, clock, fail, ok, skipped, warn

TIMEOUT_S = 3.0
MIN_VERSION = (7, 0)
"""Version of Redis; `sluice doctor` fails for an older one."""
SLOW_MS = 20.0


async def examine(url: str) -> list[Finding]:
    """Connects as a router does, and reads only."""
    if not url:
        return [skipped("redis", "If routers use --redis-url, pass --redis or SLUICE_ROUTER_REDIS_URL to check it.")]
    try:
        from redis.exceptions import RedisError

        from services.common.base.errors import SluiceError
        from services.common.redis.connect import open_probe
        from services.common.redis.servers import RedisServers
        from services.common.redis.target import parse
    except ImportError as error:
        return [skipped("redis", f"This needs the package {error.name}: install sluice-llm[router].")]
    try:
        target = parse(url)
    except SluiceError as error:
        return [fail("redis", error.message, "Correct --redis.")]
    servers = RedisServers(target, TIMEOUT_S)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            address = await servers.address("sluice")
            async with open_probe(target, address, TIMEOUT_S) as client:
                return await _check(client)
    except (RedisError, OSError) as error:
        advice = "Check host, port, password and TLS of --redis, and that the server runs."
        return [fail("redis", f"cannot be reached: {_words(error)}", advice)]
    finally:
        await servers.close()


async def _check(client: Any) -> list[Finding]:
    await client.ping()  # opens the connection
    began = time.perf_counter()
    seconds, micros = await client.time()
    ahead_s = seconds + micros / 1e6 - time.time()
    took_ms = 1000 * (time.perf_counter() - began)
    info = await client.info()
    return [_version(info), _latency(took_ms), clock("redis clock", ahead_s), *_memory(info)]


def _version(info: dict[str, Any]) -> Finding:
    version = str(info.get("valkey_version") or info.get("redis_version", ""))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < MIN_VERSION:
        return fail("redis", f"version {version or 'unknown'}", "Routers need Redis 7 or Valkey.")
    return ok("redis", f"version {version}")


def _latency(took_ms: float) -> Finding:
    if took_ms > SLOW_MS:
        return warn(
            "redis latency", f"{took_ms:.0f} ms", "Every reservation waits for it; place it closer to the routers."
        )
    return ok("redis latency", f"{took_ms:.1f} ms")


def _memory(info: dict[str, Any]) -> list[Finding]:
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    policy = str(info.get("maxmemory_policy", "noeviction"))
    found = []
    if limit and policy != "noeviction":
        advice = "Set maxmemory-policy noeviction: evicted keys are reservations and parts of the index."
        found.append(warn("redis eviction", policy, advice))
    if limit and used > 0.9 * limit:
        found.append(warn("redis memory", f"{used / limit:.0%} of maxmemory used", "Raise maxmemory."))
    return found


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
