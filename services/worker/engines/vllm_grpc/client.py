"""Client of a vLLM gRPC server."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import grpc

from services.common.base.errors import ErrorKind, SluiceError
from services.common.rpc.channels import FOREIGN_KEEPALIVE_MS, open_channel
from services.worker.engines.vllm_grpc import wire

CALL_TIMEOUT_S = 10.0
PROFILE_TIMEOUT_S = 60.0

_ERROR_KINDS = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorKind.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND: ErrorKind.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorKind.OVERLOADED,
    grpc.StatusCode.FAILED_PRECONDITION: ErrorKind.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED: ErrorKind.FAILED_PRECONDITION,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorKind.RESPONSE_TIMEOUT,
    grpc.StatusCode.CANCELLED: ErrorKind.CANCELLED,
    grpc.StatusCode.UNAVAILABLE: ErrorKind.ENGINE_SHUTDOWN,
}


class Client:
    """Calls the server with deadlines and raises its errors as SluiceError.

    Raises:
        SluiceError: FAILED_PRECONDITION when the package with vLLM's messages is not installed.
    """

    def __init__(self, address: str) -> None:
        try:
            from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
            from smg_grpc_proto.generated import common_pb2
        except ImportError as error:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                "The engine vllm-grpc needs the package with vLLM's messages: install sluice-llm[vllm-grpc].",
                param="engine",
            ) from error
        self._pb: Any = vllm_engine_pb2
        self._common: Any = common_pb2
        # Only vLLM since 0.32 permits more; health checks notice a server that hangs.
        self.channel = open_channel(address, keepalive_ms=FOREIGN_KEEPALIVE_MS)
        self._stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(self.channel)

    async def close(self) -> None:
        """Closes the channel and cancels all calls."""
        await self.channel.close()

    async def model_info(self) -> Any:
        """Calls GetModelInfo."""
        return await self._call(self._stub.GetModelInfo, self._pb.GetModelInfoRequest())

    async def server_info(self) -> Any:
        """Calls GetServerInfo."""
        return await self._call(self._stub.GetServerInfo, self._pb.GetServerInfoRequest())

    async def loads(self) -> Any:
        """Calls GetLoads."""
        return await self._call(self._stub.GetLoads, self._pb.GetLoadsRequest(include=["core"]))

    async def healthy(self) -> bool:
        """Calls HealthCheck; raises SluiceError when the server does not respond."""
        response = await self._call(self._stub.HealthCheck, self._pb.HealthCheckRequest())
        return bool(response.healthy)

    async def flush_cache(self) -> None:
        """Clears the prefix cache; raises SluiceError(FAILED_PRECONDITION) while requests hold blocks."""
        response = await self._call(self._stub.FlushCache, self._common.FlushCacheRequest())
        if not response.success:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION, f"vLLM cannot clear its cache: {response.message}", code="cache_in_use"
            )

    async def profile(self, start: bool) -> None:
        """Starts or stops the profiler that the server was started with."""
        method = self._stub.StartProfile if start else self._stub.StopProfile
        request = self._common.StartProfileRequest() if start else self._common.StopProfileRequest()
        response = await self._call(method, request, PROFILE_TIMEOUT_S)
        if not response.success:
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, f"vLLM rejected the profiler action: {response.message}")

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Aborts requests by id; the server ignores unknown ids."""
        await self._call(self._stub.Abort, self._pb.AbortRequest(request_ids=request_ids))

    async def embed(self, request_id: str, token_ids: array[int], timeout_s: float) -> bytes:
        """Returns the vector of one input as little-endian float32."""
        request = self._pb.EmbedRequest(request_id=request_id, tokenized=self._pb.TokenizedInput(input_ids=token_ids))
        return wire.read_vector(await self._call(self._stub.Embed, request, timeout_s))

    def generate(self, message: Any) -> Any:
        """Returns the call of one generation, an async iterator of GenerateResponse."""
        return self._stub.Generate(message)

    def subscribe(self, start: int) -> Any:
        """Returns the call that streams KV events from a sequence number; 0: from the oldest available, or from now."""
        return self._stub.SubscribeKvEvents(self._common.SubscribeKvEventsRequest(start_sequence_number=start))

    def tokenizer(self, timeout_s: float) -> Any:
        """Returns the call that streams the tokenizer's files as a zip archive."""
        return self._stub.GetTokenizer(self._common.GetTokenizerRequest(), timeout=timeout_s)

    async def _call(self, method: Any, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error


def error_of(error: grpc.aio.AioRpcError) -> SluiceError:
    """Converts an error of a call into a SluiceError."""
    kind = _ERROR_KINDS.get(error.code(), ErrorKind.INTERNAL)
    if kind is ErrorKind.ENGINE_SHUTDOWN:
        return SluiceError(kind, "vLLM's server cannot be reached; retry on another worker.")
    if kind is ErrorKind.INTERNAL:
        return SluiceError(kind, "vLLM's server failed on this request.")
    details = (error.details() or error.code().name).splitlines()[0][:500]
    return SluiceError(kind, f"vLLM's server rejected the request: {details}")
