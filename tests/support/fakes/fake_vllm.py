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


class FakeVllm(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Answers 1000, 1001, … and reports the prompt's blocks, by their tokens.

    Args:
        model_path: folder of the model that the server reports, under the name "tiny".
        block: tokens per block.
        first_token: of every answer.
        is_generation: whether the model generates; otherwise it embeds.

    Attributes:
        gate: closed: generations stop after their first token.
        starts: what subscribers of KV events asked to start from.
        prompts: of all generations.
        cached: prefixes whose blocks were computed.
        tells: whether computed blocks are published.
        runs: cleared: the server answers no probe, as one that was stopped.
    """

    def __init__(
        self,
        *,
        resumes: bool = True,
        model_path: str = "",
        block: int = BLOCK,
        first_token: int = 1000,
        is_generation: bool = True,
    ) -> None:
        self.resumes, self.is_generation = resumes, is_generation
        self.model_path, self.block, self.first_token = model_path, block, first_token
        self.prompts: list[list[int]] = []
        self.cached: set[tuple[int, ...]] = set()
        self.tells = True
        self.healthy, self.refuses = True, False
        self.gate = asyncio.Event()
        self.gate.set()
        self.aborted: list[str] = []
        self.cancelled = 0
        self.flushed = 0
        self.starts: list[int] = []
        self.log: list[Any] = []
        self.changed = asyncio.Event()
        self.break_streams = asyncio.Event()
        self.runs = asyncio.Event()
        self.runs.set()

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        await self.runs.wait()
        return pb.HealthCheckResponse(healthy=self.healthy)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return pb.GetModelInfoResponse(
            is_generation=self.is_generation,
            max_context_length=256,
            vocab_size=500,
            eos_token_ids=[2],
            model_path=self.model_path,
            served_model_name="tiny",
            default_sampling_params_json='{"top_k": 20}',
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return pb.GetServerInfoResponse(block_size=self.block, data_parallel_size=1, max_num_seqs=8)

    async def GetLoads(self, request: Any, context: Any) -> Any:
        return pb.GetLoadsResponse(version="0.32.0", loads=[pb.SchedulerLoad(max_total_num_tokens=64 * self.block)])

    async def Embed(self, request: Any, context: Any) -> Any:
        await self.runs.wait()
        return pb.EmbedResponse(embedding=[1.0, 2.0], embedding_dim=2)

    async def FlushCache(self, request: Any, context: Any) -> Any:
        self.flushed += 1
        return common_pb2.FlushCacheResponse(success=self.gate.is_set(), message="requests are running")

    async def Abort(self, request: Any, context: Any) -> Any:
        self.aborted += request.request_ids
        return pb.AbortResponse()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        count = request.sampling_params.max_tokens
        prompt = list(request.tokenized.input_ids)
        cached = self._cached_tokens(prompt)
        self.prompts.append(prompt)
        if self.refuses:
            yield pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason="error"))
            return
        if self.tells:
            self.publish(prompt)
        try:
            for index in range(count):
                chunk = pb.GenerateStreamChunk(token_ids=[self.first_token + index], cached_tokens=cached)
                yield pb.GenerateResponse(chunk=chunk)
                await self.gate.wait()
                if not self.healthy:
                    await context.abort(grpc.StatusCode.INTERNAL, "EngineDeadError")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        yield pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason="length", completion_tokens=count))

    def _cached_tokens(self, prompt: list[int]) -> int:
        """Returns the tokens of a prompt's leading cached blocks, and caches the others."""
        prefixes = [tuple(prompt[:end]) for end in range(self.block, len(prompt), self.block)]
        known = [prefix for prefix in prefixes if prefix in self.cached]
        self.cached.update(prefixes)
        return len(known) * self.block

    def publish(self, token_ids: list[int]) -> None:
        """The whole blocks of a prompt as one batch."""
        blocks = [
            common_pb2.KvBlock(block_hash=hash(tuple(token_ids[: end + self.block])), block_size=self.block)
            for end in range(0, len(token_ids) - self.block + 1, self.block)
        ]
        for index, block in enumerate(blocks):
            block.token_ids.extend(token_ids[index * self.block : (index + 1) * self.block])
        self._log(common_pb2.KvCacheEvent(stored=common_pb2.KvBlocksStored(blocks=blocks)))

    def clear(self) -> None:
        """Drops the whole cache, and publishes that as one batch."""
        self.cached.clear()
        self._log(common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared()))

    def _log(self, event: Any) -> None:
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
