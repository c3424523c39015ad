"""The worker under test, as its rules see it: a stub, a card, and requests that suit the card."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import grpc

from services.common.packing import pack_u32, unpack_u32
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.worker.contract.capabilities import Capability
from sluice.conformance.caller import Caller
from sluice.conformance.heard import ObservedStream
from sluice.conformance.patience import Patience
from sluice.conformance.rule import Broken
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
    """What to test.

    Attributes:
        address: host:port of the worker.
        credentials: None for plain text.
        watcher: the router that the worker was told to register with, when that is the kit.
        prefill_peer: host:port of a prefill worker of the same model, for a decode worker; empty: none.
        stop: makes the worker shut down as an operator would; None when the kit may not.
    """

    address: str
    credentials: grpc.ChannelCredentials | None = None
    watcher: Watcher | None = None
    prefill_peer: str = ""
    stop: Callable[[], Awaitable[None]] | None = None


class Subject:
    """One worker.

    Attributes:
        info: what GetInfo said when the run began.
        card: the model card of `info`.
        eos_token_ids: of the card.
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
        self.eos_token_ids = _whole(self.card.eos_token_ids)
        self._random = Random()

    def claims(self, capability: Capability) -> bool:
        """Whether the card lists a capability."""
        return capability in self.card.capabilities

    def prompt(self, length: int = PROMPT_TOKENS) -> list[int]:
        """Ids nobody has sent before, away from both ends of the vocabulary, where the special ones tend to be."""
        size = self.card.vocab_size or UNKNOWN_VOCABULARY
        return [self._random.randrange(size // 10, max(size * 9 // 10, 1)) for _ in range(length)]

    def block_prompt(self) -> list[int]:
        """A fresh prompt of a few whole cache blocks and a bit, as far as the context has room for it."""
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
        """A request as a gateway would make it.

        Args:
            prompt: ids; None: a fresh prompt.
            max_tokens: most tokens to generate.
            greedy: asks for the likeliest tokens where the engine lets a caller choose.
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

    def endless(
        self, prompt: Sequence[int] | None = None, max_tokens: int = OUTPUT_TOKENS
    ) -> worker_pb2.GenerateRequest:
        """A request that only `max_tokens` ends, as far as the engine can be told so."""
        request = self.request(prompt, max_tokens=max_tokens, stops=())
        if self.claims(Capability.IGNORE_EOS):
            request.stop.ignore_eos = True
        elif self.claims(Capability.MIN_TOKENS):
            request.stop.min_tokens = max_tokens
        return request

    def long(self, tokens: int = LONG_TOKENS) -> worker_pb2.GenerateRequest:
        """A request that runs until it is cancelled, or for as long as the context lasts."""
        room = [limit for limit in (self.card.context_length, self.card.total_blocks * self.card.block_size) if limit]
        return self.endless(max_tokens=max(min([tokens, *(limit - PROMPT_TOKENS - 1 for limit in room)]), 1))

    @property
    def takes_whole_requests(self) -> bool:
        """Whether requests need no second worker."""
        alone = (common_pb2.WORKER_ROLE_UNSPECIFIED, common_pb2.WORKER_ROLE_AGGREGATED)
        return self.info.role in alone or self.claims(Capability.LOCAL_PREFILL)

    @property
    def lasts(self) -> bool:
        """Whether `endless` requests really are: natural ends do not end them."""
        return self.claims(Capability.IGNORE_EOS) or self.claims(Capability.MIN_TOKENS)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Caller]:
        """A session of its own; what still runs at the end is cancelled."""
        caller = Caller(self.stub, self.patience)
        try:
            yield caller
        finally:
            await caller.close()

    @asynccontextmanager
    async def peer(self, address: str) -> AsyncIterator[Subject]:
        """Another worker, asked like this one."""
        channel = open_channel(address, self.target.credentials)
        try:
            stub = worker_pb2_grpc.WorkerStub(channel)
            info = await self.answer(stub.GetInfo(worker_pb2.GetInfoRequest()))
            yield Subject(Target(address, self.target.credentials), channel, self.patience, info)
        finally:
            await channel.close()

    async def ask(self, request: worker_pb2.GenerateRequest) -> ObservedStream:
        """One request on a session of its own, to its end."""
        async with self.session() as caller:
            return await caller.ask_one(request)

    async def generate(self, request: worker_pb2.GenerateRequest) -> ObservedStream:
        """One request by the server-streaming twin, to the end of the stream."""
        heard = ObservedStream(request)
        call = self.stub.Generate(request, timeout=self.patience.generation_s)
        async for delta in call:
            late = bool(heard.token_ids)
            if delta.token_ids:
                heard.take_tokens(_whole(delta.token_ids))
            if delta.HasField("extra"):
                heard.take_extra(delta.extra, late)
        return heard

    async def answer(self, call: Awaitable[A]) -> A:
        """A unary call's answer; Broken when it fails or takes too long."""
        try:
            async with asyncio.timeout(self.patience.answer_s):
                return await call
        except TimeoutError:
            raise Broken(f"No answer within {self.patience.answer_s:g} s.") from None
        except grpc.aio.AioRpcError as error:
            raise Broken(f"The call failed: {from_rpc_error(error, 'worker').message}") from error

    async def load(self) -> common_pb2.WorkerLoad:
        """The load now."""
        return (await self.answer(self.stub.GetInfo(worker_pb2.GetInfoRequest()))).load

    async def settles(self, settled: Callable[[common_pb2.WorkerLoad], bool]) -> common_pb2.WorkerLoad:
        """Asks for the load until it is as wanted or patience ends; the last answer."""
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
        """Operates the engine; grpc.aio.AioRpcError when it refuses."""
        async with asyncio.timeout(self.patience.generation_s):
            return await self.stub.Control(worker_pb2.ControlRequest(action=action, arguments=arguments))


def prompt_of(request: worker_pb2.GenerateRequest) -> list[int]:
    """The ids of a request's prompt."""
    return unpack_u32(request.tokens.token_ids).tolist()


def _whole(packed: bytes) -> list[int]:
    """Whole ids of a packed field; rules about the form complain about the rest."""
    return unpack_u32(packed[: len(packed) // 4 * 4]).tolist()
