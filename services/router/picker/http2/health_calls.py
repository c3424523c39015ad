"""Serves the gRPC health service on a server of its own protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2

from services.common.rpc.health import Health
from services.common.tasks import TaskOwner
from services.router.picker.http2.call import CallHandler, GrpcCall, framed

NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

Method = Callable[[Any, Any], Coroutine[Any, Any, Any]]


class _Aborted(Exception):
    """Ends the task of a call that has been answered with an error."""


class _HealthContext:
    """The part of a gRPC context that `Health` uses."""

    def __init__(self, call: GrpcCall) -> None:
        self._call = call
        self.trailing: list[tuple[str, str | bytes]] = []

    def set_trailing_metadata(self, pairs: Iterable[tuple[str, str | bytes]]) -> None:
        """Sets what is sent after the response."""
        self.trailing = list(pairs)

    async def write(self, message: Any) -> None:
        """Sends one of several responses."""
        self._call.send(framed(message.SerializeToString()))

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing: Iterable[tuple[str, str | bytes]] = ()
    ) -> NoReturn:
        """Ends the call with an error."""
        self._call.finish(code.value[0], details, [*self.trailing, *trailing])
        raise _Aborted


class _HealthCall:
    """One call of Check or Watch."""

    def __init__(self, call: GrpcCall, method: Method, tasks: TaskOwner) -> None:
        self._call = call
        self._method = method
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None

    def on_message(self, message: bytes) -> None:
        """Starts serving the request."""
        if self._task is None:
            request = health_pb2.HealthCheckRequest.FromString(message)
            self._task = self._tasks.spawn(self._serve(request), "picker-health")

    def on_half_close(self) -> None:
        """Needs nothing: the request has arrived."""

    def on_end(self) -> None:
        """Ends a watch."""
        if self._task is not None:
            self._task.cancel()

    async def _serve(self, request: Any) -> None:
        context = _HealthContext(self._call)
        try:
            response = await self._method(request, context)
        except _Aborted:
            return
        if response is not None:
            await context.write(response)
        self._call.finish(more=context.trailing)


def health_methods(health: Health, tasks: TaskOwner) -> Mapping[str, Callable[[GrpcCall], CallHandler]]:
    """Returns what serves the methods of the health service."""
    return {
        f"/{NAME}/Check": lambda call: _HealthCall(call, health.Check, tasks),
        f"/{NAME}/Watch": lambda call: _HealthCall(call, health.Watch, tasks),
    }
