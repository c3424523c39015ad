"""A mock worker for SGLang's model gateway: Sluice's mock engine behind SGLang's gRPC scheduler protocol.

    python benchmarks/smg_worker.py --port 50051 --model FOLDER --model-name tiny --speedup 1000

A message carries the tokens that are ready when it is written, as with vLLM: one at an engine's pace, several when
the engine is faster than gRPC; with --single it carries one token, as with SGLang. Cache events follow the engine's
steps, for the gateway's event-driven routing.
"""

from __future__ import annotations

import argparse
import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import uvloop
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from services.common.types.hashing import block_hashes
from services.worker.contract.cache_events import BlocksRemoved, BlocksStored, KvEvent
from services.worker.contract.delta_stream import DeltaStream
from services.worker.contract.engine import EngineConfig, GenerateContext
from services.worker.contract.generation import FinishReason, GenerateRequest, PositionLogprobs, StopParams
from services.worker.engines.mock import MockEngine
from services.worker.settings import WorkerSettings

FINISH_REASONS = {FinishReason.LENGTH: "length", FinishReason.STOP: "stop"}
STOPS_WITHIN_S = 1.0


class CacheFeed:
    """Translates the engine's cache events, which name blocks by hash, into events with the blocks' tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: dict[int, tuple[int | None, Sequence[int]]] = {}
        self._queues: set[asyncio.Queue[Any]] = set()
        self._published = 0

    def describe(self, token_ids: array[int], parent: int | None = None) -> int | None:
        """Remembers the tokens of the whole blocks that follow `parent`; returns the last one's hash.

        The engine must not have stored the blocks yet.
        """
        size = self.block_size
        for index, block in enumerate(block_hashes(token_ids, size, parent=parent)):
            self._blocks[block] = (parent, token_ids[index * size : (index + 1) * size])
            parent = block
        return parent

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Sends the events of one engine step to every subscriber."""
        self._published += 1
        batch = common_pb2.KvEventBatch(sequence_number=self._published)
        for event in events:
            if isinstance(event, BlocksStored):
                self._add_stored(batch, event.hashes)
            elif isinstance(event, BlocksRemoved):
                for block in event.hashes:
                    self._blocks.pop(block, None)
                batch.events.add().removed.block_hashes.extend(map(_signed, event.hashes))
        for queue in self._queues:
            queue.put_nowait(batch)

    async def subscribe(self) -> AsyncIterator[Any]:
        """Yields batches from now on, until cancelled."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self._queues.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._queues.discard(queue)

    def _add_stored(self, batch: Any, hashes: Sequence[int]) -> None:
        """Adds an event for each chain of blocks; one step stores blocks of many sequences.

        A block that is stored again after its last copy was removed has lost its description and is left out.
        """
        last: int | None = None
        stored: Any = None
        for block in hashes:
            if block not in self._blocks:
                continue
            parent, token_ids = self._blocks[block]
            if stored is None or parent is None or parent != last:
                stored = batch.events.add().stored
                if parent is not None:
                    stored.parent_block_hash = _signed(parent)
            stored.blocks.add(block_hash=_signed(block), token_ids=token_ids, block_size=self.block_size)
            last = block


class _Output(DeltaStream):
    """Collects one request's tokens and describes the blocks that they fill."""

    def __init__(self, feed: CacheFeed, prompt: array[int]) -> None:
        super().__init__()
        self._feed = feed
        self._last_block = feed.describe(prompt)
        self._open_block = prompt[len(prompt) // feed.block_size * feed.block_size :]

    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()) -> None:
        super().push(token_ids, logprobs)
        self._open_block.extend(token_ids)
        if len(self._open_block) >= self._feed.block_size:
            self._last_block = self._feed.describe(self._open_block, self._last_block)
            del self._open_block[: len(self._open_block) // self._feed.block_size * self._feed.block_size]


class Scheduler(sglang_scheduler_pb2_grpc.SglangSchedulerServicer):  # type: ignore[misc]  # the base is untyped
    """Answers the calls that the gateway makes of a worker; the others are unimplemented."""

    def __init__(self, engine: MockEngine, config: EngineConfig, single: bool) -> None:
        self._engine = engine
        self._config = config
        self._single = single
        self._feed = CacheFeed(config.block_size)
        for source in engine.kv_event_sources():
            source.subscribe(self._feed.publish)

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        """Says that the engine is healthy."""
        return pb.HealthCheckResponse(healthy=True)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        """Describes the model."""
        config = self._config
        return pb.GetModelInfoResponse(
            model_path=config.source,
            tokenizer_path=config.source,
            served_model_name=config.model,
            is_generation=True,
            max_context_length=config.context_length,
            max_req_input_len=config.context_length,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        """Describes the server."""
        tokens = self._config.total_blocks * self._config.block_size
        return pb.GetServerInfoResponse(server_type="grpc", max_total_num_tokens=tokens)

    async def GetLoads(self, request: Any, context: Any) -> Any:
        """Reports the engine's load."""
        (load,) = self._engine.load()
        config = self._config
        return pb.GetLoadsResponse(
            dp_rank_count=1,
            loads=[
                pb.SchedulerLoad(
                    num_running_reqs=load.running_requests,
                    num_waiting_reqs=load.waiting_requests,
                    num_total_reqs=load.running_requests + load.waiting_requests,
                    num_used_tokens=load.used_blocks * config.block_size,
                    max_total_num_tokens=config.total_blocks * config.block_size,
                    token_usage=load.used_blocks / config.total_blocks,
                    max_running_requests=config.max_sequences,
                )
            ],
        )

    async def Abort(self, request: Any, context: Any) -> Any:
        """Ends a request early."""
        self._engine.abort(GenerateContext(request.request_id))
        return pb.AbortResponse(success=True)

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Streams the engine's cache events from now on."""
        await context.send_initial_metadata(())
        async for batch in self._feed.subscribe():
            yield batch

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Streams a generation: chunks of tokens, then one message without tokens that completes it."""
        prompt = array("I", request.tokenized.input_ids)
        output = _Output(self._feed, prompt)
        live = GenerateContext(request.request_id)
        self._engine.submit(_request_of(request, prompt, self._config.model), live, output)
        answer = _Answer(request.request_id, len(prompt))
        try:
            async with aclosing(output.deltas()) as deltas:
                async for delta in deltas:
                    if delta.finish_reason is not None:
                        yield answer.complete(delta.finish_reason, whole=not request.stream)
                        return
                    answer.cached_tokens = delta.cached_tokens or answer.cached_tokens
                    for token_ids in ([one] for one in delta.token_ids) if self._single else (delta.token_ids,):
                        chunk = answer.chunk(token_ids)
                        if request.stream:
                            yield chunk
        finally:
            self._engine.abort(live)  # ignored when it has ended


class _Answer:
    """Counts the tokens of one answer and builds its messages."""

    def __init__(self, request_id: str, prompt_tokens: int) -> None:
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        self._token_ids = array("I")
        self.cached_tokens = 0

    def chunk(self, token_ids: Sequence[int]) -> Any:
        """Returns the message of the next tokens."""
        self._token_ids.extend(token_ids)
        return pb.GenerateResponse(
            request_id=self._request_id, chunk=pb.GenerateStreamChunk(token_ids=token_ids, **self._counts())
        )

    def complete(self, reason: FinishReason, *, whole: bool) -> Any:
        """Returns the last message, with all tokens if `whole`."""
        end = pb.GenerateComplete(
            output_ids=self._token_ids if whole else (),
            finish_reason=FINISH_REASONS.get(reason, "abort"),
            **self._counts(),
        )
        return pb.GenerateResponse(request_id=self._request_id, complete=end)

    def _counts(self) -> dict[str, int]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": len(self._token_ids),
            "cached_tokens": self.cached_tokens,
        }


def _request_of(request: Any, prompt: array[int], model: str) -> GenerateRequest:
    sampling = request.sampling_params
    stop = StopParams(
        max_tokens=sampling.max_new_tokens if sampling.HasField("max_new_tokens") else None,
        min_tokens=sampling.min_new_tokens,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
    )
    return GenerateRequest(request.request_id, model, prompt, stop=stop)


def _signed(block: int) -> int:
    return block - (1 << 64) if block >> 63 else block


async def serve(port: int, settings: WorkerSettings, single: bool) -> None:
    """Serves until the process is ended; prints a line when it accepts requests."""
    engine = MockEngine.from_args(settings)
    scheduler = Scheduler(engine, await engine.start("mock"), single)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(scheduler, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("ready", flush=True)
    try:
        await server.wait_for_termination()
    finally:
        await server.stop(STOPS_WITHIN_S)
        await engine.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--model-name", required=True)
    parser.add_argument("--speedup", type=float, default=1.0, help="of the mock engine's clock")
    parser.add_argument("--single", action="store_true", help="a message for each token")
    options = parser.parse_args()
    model = f"{options.model_name}={options.model}"
    uvloop.run(serve(options.port, WorkerSettings(model=model, speedup=options.speedup), options.single))
