"""Probes the readiness of processes: gRPC health for the services, GET /ready for the gateway."""

from __future__ import annotations

import asyncio
import json
import ssl

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.net.addresses import join
from services.common.rpc.channels import open_channel
from sluice.cli.up.plan import Process
from sluice.cli.up.tls import probe_context, probe_credentials
from sluice.v1 import worker_pb2, worker_pb2_grpc

PROBE_EVERY_S = 0.1
TIMEOUT_S = 2.0
STARTING = "starting"
NOT_READY = "not ready yet"

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_MAX_BYTES = 64 << 10
"""Bytes that are read of a process' answer about its readiness; the rest is ignored."""
_MAX_REASON = 160
"""Characters of the reason for which a process is not ready; the rest is left out."""


def reachable(host: str) -> str:
    """Returns the host under which this machine can reach a server that listens on `host`."""
    return _WILDCARDS.get(host, host)


class Probe:
    """Probes one process; close it afterwards.

    Args:
        pid: id of the process, which distinguishes it from others that share its port.
    """

    def __init__(self, process: Process, pid: int = 0) -> None:
        self._process = process
        self._pid = pid
        self._host = reachable(process.host)
        self._channel: grpc.aio.Channel | None = None
        self._https: ssl.SSLContext | None = None
        tls = process.tls
        if process.health == "grpc":
            credentials = None if tls is None else probe_credentials(tls)
            self._channel = open_channel(join(self._host, process.port), credentials)
        elif tls is not None:
            self._https = probe_context(tls)

    async def check(self) -> str:
        """Returns why the process is not ready, in a few words; empty if it is."""
        return await self._probe_http() if self._channel is None else await self._probe_grpc(self._channel)

    async def close(self) -> None:
        """Closes the connection."""
        if self._channel is not None:
            await self._channel.close()

    async def _probe_grpc(self, channel: grpc.aio.Channel) -> str:
        health = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return STARTING if error.code() is grpc.StatusCode.UNAVAILABLE else f"health check: {error.code().name}"
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return ""
        return await self._phase(channel) if self._process.kind == "worker" else NOT_READY

    async def _phase(self, channel: grpc.aio.Channel) -> str:
        """Returns the phase of a worker that does not serve yet."""
        try:
            info = await worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return NOT_READY
        share = f" ({info.phase_share:.0%})" if info.HasField("phase_share") else ""
        return f"{info.phase}{share}" if info.phase else NOT_READY

    async def _probe_http(self) -> str:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, body = await self._get("/ready?workers=0")
        except TimeoutError:
            return "no response"
        except (OSError, ValueError):
            return STARTING
        if status != 200:
            return _missing_services(body)
        return self._missing_workers(body)

    def _missing_workers(self, body: str) -> str:
        if not self._process.workers:
            return ""
        try:
            state = json.loads(body)
            connected, pid = state["workers"], state["pid"]
        except (ValueError, KeyError, TypeError):
            return "invalid response"
        if self._process.shares_port and pid != self._pid:
            return STARTING  # another process responded; a later connection reaches this one
        wanted = self._process.workers
        return "" if connected >= wanted else f"connected to {connected} of {wanted} workers"

    async def _get(self, path: str) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection(self._host, self._process.port, ssl=self._https)
        try:
            host = join(self._host, self._process.port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            answer = bytearray()
            while len(answer) < _MAX_BYTES and (part := await reader.read(_MAX_BYTES)):
                answer += part
        finally:
            writer.close()
        head, _, body = bytes(answer).partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]) if b" " in head else 0, body.decode(errors="replace").strip()


def _missing_services(body: str) -> str:
    """Returns for which services a gateway waits, from its answer that it is not ready."""
    try:
        services: dict[str, bool] = json.loads(body)["services"]
        missing = [name for name, serves in services.items() if not serves]
    except (ValueError, KeyError, TypeError, AttributeError):
        return NOT_READY
    return f"waits for {', '.join(missing)}"[:_MAX_REASON] if missing else NOT_READY
