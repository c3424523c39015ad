"""A worker: runs prompts."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from sluice_client import methods
from sluice_client.connection import Connection
from sluice_client.errors import error_of, error_of_detail
from sluice_client.options import Credential, Options, Tls
from sluice_client.packing import TokenIds, packed_ids, unpack_u32
from sluice_client.wire import (
    AbortRequest,
    DisaggregationParams,
    ErrorKind,
    FinishReason,
    GenerateRequest,
    GetInfoRequest,
    GetInfoResponse,
    GuidedDecoding,
    OutputOptions,
    SamplingOptions,
    StopOptions,
    TokenExtra,
    TokenPrompt,
    TraceContext,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Delta:
    """What a worker has generated since the last delta.

    Attributes:
        token_ids: array("I"); may be empty.
        extra: logprobs, cached tokens, and on the last delta reason and usage; None when there is nothing to add.
    """

    token_ids: array[int]
    extra: TokenExtra | None = None

    @property
    def finish_reason(self) -> FinishReason:
        """Why the generation ended; UNSPECIFIED on every delta but the last."""
        return self.extra.finish_reason if self.extra is not None else FinishReason.UNSPECIFIED

    @property
    def usage(self) -> Usage | None:
        """Token counts, on the last delta."""
        return self.extra.usage if self.extra is not None else None


class WorkerClient:
    """Asks one worker. Use it with `async with`, or `close` it.

    One client carries any number of calls at once on one connection. Every method raises SluiceError, see `errors`.

    Args:
        address: host:port, as in a reservation's target.
        tls: None for plain text.
        token: bearer token, or what gives one for each call.
        metadata: gives more metadata for each call.
        timeout_s: for each call but `generate` that does not say otherwise.
        keepalive_s: how often a connection with calls under way is tested.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        token: Credential = "",
        metadata: Callable[[], Mapping[str, str]] | None = None,
        timeout_s: float = 5.0,
        keepalive_s: float = 10.0,
    ) -> None:
        self._connection = Connection(address, Options(tls, token, metadata, keepalive_s))
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every call under way."""
        self._connection.close()

    async def generate(
        self,
        request_id: str,
        model: str,
        token_ids: TokenIds,
        *,
        max_tokens: int | None = None,
        sampling: SamplingOptions | None = None,
        stop: StopOptions | None = None,
        output: OutputOptions | None = None,
        guided: GuidedDecoding | None = None,
        lora: str = "",
        cache_salt: str = "",
        priority: int = 0,
        data_parallel_rank: int | None = None,
        disaggregation: DisaggregationParams | None = None,
        trace: TraceContext | None = None,
        timeout_s: float = 600.0,
    ) -> AsyncGenerator[Delta, None]:
        """Runs a prompt. The last delta, and only that, has a finish reason.

        A caller that stops reading cancels the generation when the iterator is closed; `contextlib.aclosing` does that
        at once. A generation that fails half-way raises, and is never repeated here.

        Args:
            request_id: unique among all requests alive; the reservation's.
            model: served name, or one of the worker's adapters.
            token_ids: the prompt, at least one.
            max_tokens: short for StopOptions(max_tokens=...).
            sampling: unset fields take the model's defaults.
            stop: when to end; unset: the worker's defaults. Not together with max_tokens.
            output: log-probabilities.
            guided: grammar.
            lora: adapter name; empty for the base model.
            cache_salt: tenant salt, the same as in the reservation; empty for none.
            priority: lower runs first.
            data_parallel_rank: the reservation's; None lets the engine choose.
            disaggregation: the worker's part in a request that is split.
            trace: W3C trace context.
            timeout_s: for the whole generation.
        """
        if max_tokens is not None and stop is not None:
            raise ValueError("give max_tokens or stop, not both")
        request = GenerateRequest(
            request_id=request_id,
            model=model,
            tokens=TokenPrompt(token_ids=packed_ids(token_ids)),
            sampling=sampling,
            stop=StopOptions(max_tokens=max_tokens) if max_tokens is not None else stop,
            output=output,
            guided=guided,
            lora=lora,
            cache_salt=cache_salt,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
            disaggregation=disaggregation,
            trace=trace,
        )
        ended = False
        async with aclosing(self._connection.stream(methods.GENERATE, request, timeout_s)) as messages:
            async for message in messages:
                extra = message.extra
                if extra is not None and extra.error is not None:
                    raise error_of_detail(extra.error)
                delta = Delta(unpack_u32(message.token_ids), extra)
                ended = delta.finish_reason != FinishReason.UNSPECIFIED
                yield delta
        if not ended:
            raise error_of(
                ErrorKind.STREAM_INCOMPLETE,
                f"{self._connection.address} ended the generation without saying why.",
                code="stream_incomplete",
                retryable=True,
            )

    async def abort(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Stops a request, whoever started it; False when no such request was alive."""
        request = AbortRequest(request_id=request_id)
        return (
            await self._connection.unary(methods.ABORT, request, self._timeout_s if timeout_s is None else timeout_s)
        ).found

    async def get_info(self, *, timeout_s: float | None = None) -> GetInfoResponse:
        """The worker's card, engine and load."""
        return await self._connection.unary(
            methods.INFO, GetInfoRequest(), self._timeout_s if timeout_s is None else timeout_s
        )
