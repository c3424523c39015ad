"""A stand-in for `vllm serve --grpc`: its messages, tokens anyone can check, and no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

BLOCK = 4


class FakeVllm(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Answers 1000, 1001, … and reports the prompt's blocks, by the numbers of their tokens.

    Attributes:
        gate: closed: generations stop after their first token.
        starts: what subscribers of KV events asked to start from.
    """

    def __init__(self, *, resumes: bool = True) -> None:
        self.resumes = resumes
        self.healthy = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.aborted: list[str] = []
        self.cancelled = 0
        self.flushed = 0
        self.starts: list[int] = []
        self.log: list[Any] = []
        self.changed = asyncio.Event()
        self.break_streams = asyncio.Event()

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        return pb.HealthCheckResponse(healthy=self.healthy)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return pb.GetModelInfoResponse(
            is_generation=True,
            max_context_length=256,
            vocab_size=500,
            eos_token_ids=[2],
            default_sampling_params_json='{"top_k": 20}',
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return pb.GetServerInfoResponse(block_size=BLOCK, data_parallel_size=1, max_num_seqs=8)

    async def GetLoads(self, request: Any, context: Any) -> Any:
        return pb.GetLoadsResponse(version="0.32.0", loads=[pb.SchedulerLoad(max_total_num_tokens=64 * BLOCK)])

    async def FlushCache(self, request: Any, context: Any) -> Any:
        self.flushed += 1
        return common_pb2.FlushCacheResponse(success=self.gate.is_set(), message="requests are running")

    async def Abort(self, request: Any, context: Any) -> Any:
        self.aborted += request.request_ids
        return pb.AbortResponse()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        count = request.sampling_params.max_tokens
        self.publish(list(request.tokenized.input_ids))
        try:
            for index in range(count):
                yield pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[1000 + index], cached_tokens=BLOCK))
                await self.gate.wait()
                if not self.healthy:
                    await context.abort(grpc.StatusCode.INTERNAL, "EngineDeadError")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        yield pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason="length", completion_tokens=count))

    def publish(self, token_ids: list[int]) -> None:
        """The whole blocks of a prompt as one batch."""
        blocks = [
            common_pb2.KvBlock(block_hash=sum(token_ids[: end + BLOCK]), block_size=BLOCK)
            for end in range(0, len(token_ids) - BLOCK + 1, BLOCK)
        ]
        for index, block in enumerate(blocks):
            block.token_ids.extend(token_ids[index * BLOCK : (index + 1) * BLOCK])
        event = common_pb2.KvCacheEvent(stored=common_pb2.KvBlocksStored(blocks=blocks))
        batch = common_pb2.KvEventBatch(sequence_number=len(self.log), timestamp=float(len(self.log)), events=[event])
        self.log.append(batch)
        self.changed.set()

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        start = request.start_sequence_number
        self.starts.append(start)
        if start and not self.resumes:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "resubscribe with zero")
        await context.send_initial_metadata(())
        following = start if self.resumes else len(self.log)
        while not self.break_streams.is_set():
            for batch in self.log[following:]:
                yield batch
            following = len(self.log)
            self.changed.clear()
            waits = [asyncio.ensure_future(one.wait()) for one in (self.changed, self.break_streams)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream broke")


@asynccontextmanager
async def fake_vllm(servicer: FakeVllm) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    """The address and the server, stopped at the end."""
    server = grpc.aio.server()
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        await server.stop(0)
