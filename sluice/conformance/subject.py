"""The worker under test: its stub, its card, and requests that match the card."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import grpc

from services.common.base.packing import pack_u32, unpack_u32
from services.common.rpc.channels import FOREIGN_KEEPALIVE_MS, open_channel
from services.common.rpc.errors import from_rpc_error
from services.worker.contract.capabilities import Capability
from sluice.conformance.caller import ConformanceClient
from sluice.conformance.exceptions import RuleFailed
from sluice.conformance.observed_stream import ObservedStream
from sluice.conformance.patience import Patience
from sluice.conformance.watching import Watcher
from sluice.v1 import common_pb2, worker_pb2, worker_pb2_grpc

PROMPT_TOKENS = 24
PROMPT_BLOCKS = 4
OUTPUT_TOKENS = 12
LONG_TOKENS = 10_000
UNKNOWN_VOCABULARY = 256
POLL_S = 0.02

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Target:
    """The worker to test, and what the kit may use for it.

    Attributes:
        address: host:port of the worker.
        credentials: None for plaintext.
        watcher: the kit's router, if the worker is configured to register with it.
        prefill_peer: host:port of a prefill worker of the same model, for a decode worker; empty: none.
        stop: shuts the worker down as an operator would; None: the kit must not stop it.
    """

    address: str
    credentials: grpc.ChannelCredentials | None = None
    watcher: Watcher | None = None
    prefill_peer: str = ""
    stop: Callable[[], Awaitable[None]] | None = None


class Subject:
    """Sends requests to one worker.

    Attributes:
        info: the GetInfo response at the beginning of the run.
        card: the model card of `info`.
        eos_token_ids: end-of-sequence ids of the card.
    """

    def __init__(
        self, target: Target, channel: grpc.aio.Channel, patience: Patience, info: worker_pb2.GetInfoResponse
    ) -> None:
        self.target = target
        self.channel = channel
        self.patience = patience
        self.info = info
        self.card = info.card
        self.stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        self.eos_token_ids = _complete_ids(self.card.eos_token_ids)
        self._random = Random()

    def claims(self, capability: Capability) -> bool:
        """Whether the card lists a capability."""
        return capability in self.card.capabilities

    def prompt(self, length: int = PROMPT_TOKENS) -> list[int]:
        """Returns new random ids, away from both ends of the vocabulary, where special tokens tend to be."""
        size = self.card.vocab_size or UNKNOWN_VOCABULARY
        return [self._random.randrange(size // 10, max(size * 9 // 10, 1)) for _ in range(length)]

    def block_prompt(self) -> list[int]:
        """Returns a new prompt of a few complete cache blocks and three more tokens, within the context length."""
        block, context = self.card.block_size, self.card.context_length
        blocks = min(PROMPT_BLOCKS, max((context - OUTPUT_TOKENS) // block - 1, 1)) if context else PROMPT_BLOCKS
        return self.prompt(blocks * block + 3)

    def request(
        self,
        prompt: Sequence[int] | None = None,
        *,
        max_tokens: int = OUTPUT_TOKENS,
        greedy: bool = True,
        stops: Sequence[int] | None = None,
    ) -> worker_pb2.GenerateRequest:
        """Returns a request as a gateway would send it.

        Args:
            prompt: ids; None: a new prompt.
            max_tokens: maximum number of tokens to generate.
            greedy: use temperature 0 if the engine supports it.
            stops: stop ids; None: the model's end-of-sequence ids.
        """
        request = worker_pb2.GenerateRequest(
            request_id=f"conformance-{uuid.uuid4().hex}",
            model=self.card.model,
            tokens=worker_pb2.TokenPrompt(token_ids=pack_u32(self.prompt() if prompt is None else prompt)),
            stop=common_pb2.StopOptions(
                max_tokens=max_tokens,
                stop_token_ids=pack_u32(self.eos_token_ids if stops is None else stops),
                eos_token_ids=pack_u32(self.eos_token_ids),
            ),
        )
        if greedy and self.claims(Capability.TEMPERATURE):
            request.sampling.temperature = 0.0
        return request

    def full_length(
        self, prompt: Sequence[int] | None = None, max_tokens: int = OUTPUT_TOKENS
    ) -> worker_pb2.GenerateRequest:
        """Returns a request that ends only at `max_tokens`, if the engine supports that."""
        request = self.request(prompt, max_tokens=max_tokens, stops=())
        if self.claims(Capability.IGNORE_EOS):
            request.stop.ignore_eos = True
        elif self.claims(Capability.MIN_TOKENS):
            request.stop.min_tokens = max_tokens
        return request

    def long(self, tokens: int = LONG_TOKENS) -> worker_pb2.GenerateRequest:
        """Returns a request that runs until it is cancelled or the context is full."""
        room = [limit for limit in (self.card.context_length, self.card.total_blocks * self.card.block_size) if limit]
        return self.full_length(max_tokens=max(min([tokens, *(limit - PROMPT_TOKENS - 1 for limit in room)]), 1))

    @property
    def unknown_model(self) -> str:
        """The name of a model that the worker does not serve."""
        return f"{self.card.model}-that-is-not-served"

    @property
    def serves_complete_requests(self) -> bool:
        """Whether the worker serves requests without a second worker."""
        complete = (common_pb2.WORKER_ROLE_UNSPECIFIED, common_pb2.WORKER_ROLE_AGGREGATED)
        return self.info.role in complete or self.claims(Capability.LOCAL_PREFILL)

    @property
    def supports_full_length(self) -> bool:
        """Whether `full_length` requests never end before `max_tokens`."""
        return self.claims(Capability.IGNORE_EOS) or self.claims(Capability.MIN_TOKENS)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[ConformanceClient]:
        """Opens a session; cancels the requests still running at the end."""
        caller = ConformanceClient(self.stub, self.patience)
        try:
            yield caller
        finally:
            await caller.close()

    @asynccontextmanager
    async def peer(self, address: str) -> AsyncIterator[Subject]:
        """Connects to another worker."""
        channel = open_channel(address, self.target.credentials, keepalive_ms=FOREIGN_KEEPALIVE_MS)
        try:
            stub = worker_pb2_grpc.WorkerStub(channel)
            info = await self.call(stub.GetInfo(worker_pb2.GetInfoRequest()))
            yield Subject(Target(address, self.target.credentials), channel, self.patience, info)
        finally:
            await channel.close()

    async def complete(self, request: worker_pb2.GenerateRequest) -> ObservedStream:
        """Runs one request to its end on a new session."""
        async with self.session() as caller:
            return await caller.complete_one(request)

    async def generate(self, request: worker_pb2.GenerateRequest) -> ObservedStream:
        """Runs one request to the end of the stream with the Generate RPC."""
        stream = ObservedStream(request)
        call = self.stub.Generate(request, timeout=self.patience.generation_s)
        async for delta in call:
            late = bool(stream.token_ids)
            if delta.token_ids:
                stream.take_tokens(_complete_ids(delta.token_ids))
            if delta.HasField("extra"):
                stream.take_extra(delta.extra, late)
        return stream

    async def call(self, call: Awaitable[A]) -> A:
        """Returns the response of a unary call; raises RuleFailed when it fails or times out."""
        try:
            async with asyncio.timeout(self.patience.answer_s):
                return await call
        except TimeoutError:
            raise RuleFailed(f"No response within {self.patience.answer_s:g} s.") from None
        except grpc.aio.AioRpcError as error:
            raise RuleFailed(f"The call failed: {from_rpc_error(error, 'worker').message}") from error

    async def load(self) -> common_pb2.WorkerLoad:
        """Returns the current load."""
        return (await self.call(self.stub.GetInfo(worker_pb2.GetInfoRequest()))).load

    async def wait_for_load(self, settled: Callable[[common_pb2.WorkerLoad], bool]) -> common_pb2.WorkerLoad:
        """Polls the load until `settled` returns True or the deadline passes; returns the last load."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.patience.settle_s
        while True:
            load = await self.load()
            if settled(load) or loop.time() >= until:
                return load
            await asyncio.sleep(POLL_S)

    async def control(
        self, action: worker_pb2.ControlRequest.Action.ValueType, **arguments: str
    ) -> worker_pb2.ControlResponse:
        """Runs a control action; raises grpc.aio.AioRpcError when the worker refuses it."""
        async with asyncio.timeout(self.patience.generation_s):
            return await self.stub.Control(worker_pb2.ControlRequest(action=action, arguments=arguments))


def prompt_of(request: worker_pb2.GenerateRequest) -> list[int]:
    """Returns the prompt ids of a request."""
    return unpack_u32(request.tokens.token_ids).tolist()


def _complete_ids(packed: bytes) -> list[int]:
    """Unpacks ids, ignoring an incomplete last one, which other rules detect."""
    return unpack_u32(packed[: len(packed) // 4 * 4]).tolist()
