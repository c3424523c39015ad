"""A gRPC server whose handlers are made once, when they are registered, and not for each call as by an interceptor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import grpc

from services.common.rpc.frame_guard import with_guard

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class _GuardedHandlers(grpc.GenericRpcHandler):
    """The handlers of all services of a server, by method, whose requests are checked.

    gRPC asks one after the other for each call.

    Attributes:
        handlers: each returns the same handler for a method each time.
    """

    def __init__(self) -> None:
        self.handlers: list[grpc.GenericRpcHandler] = []
        self._guarded: dict[str, Handler] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        method = handler_call_details.method
        if method in self._guarded:
            return self._guarded[method]
        for handlers in self.handlers:
            if (handler := handlers.service(handler_call_details)) is not None:
                self._guarded[method] = with_guard(handler)
                return self._guarded[method]
        return None


class GuardedServer(grpc.aio.Server):
    """Checks the requests of all methods of a server, see `frame_guard`.

    Args:
        server: serves the handlers.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self._guarded = _GuardedHandlers()
        server.add_generic_rpc_handlers((self._guarded,))

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._guarded.handlers += generic_rpc_handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """Adds the handlers as generic ones.

        gRPC waits for the next call of each registered method by itself, and every call costs some work for each method
        of the server.
        """
        self.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, dict(method_handlers)),))

    def add_insecure_port(self, address: str) -> int:
        return self._server.add_insecure_port(address)

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        return self._server.add_secure_port(address, server_credentials)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace: float | None) -> None:
        await self._server.stop(grace)

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        return await self._server.wait_for_termination(timeout)
