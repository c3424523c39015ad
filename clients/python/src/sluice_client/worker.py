"""Client of a worker, which runs prompts."""

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
    """Output of a worker since the last delta.

    Attributes:
        token_ids: array("I"); may be empty.
        extra: logprobs, cached tokens, and on the last delta finish reason and usage; None if there are none.
    """

    token_ids: array[int]
    extra: TokenExtra | None = None

    @property
    def finish_reason(self) -> FinishReason:
        """The finish reason; UNSPECIFIED on every delta but the last."""
        return self.extra.finish_reason if self.extra is not None else FinishReason.UNSPECIFIED

    @property
    def usage(self) -> Usage | None:
        """Token counts, on the last delta."""
        return self.extra.usage if self.extra is not None else None


class WorkerClient:
    """Calls one worker; use it with `async with`, or `close` it.

    One client makes any number of concurrent calls on one connection. Every method raises SluiceError, see `errors`.

    Args:
        address: host:port, as in a reservation's target.
        tls: None for plain text.
        token: bearer token, or a function that returns one for each call.
        metadata: returns more metadata for each call.
        timeout_s: default timeout of every call but `generate`.
        keepalive_s: interval of pings on a connection with running calls.
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
        """Closes the client, which ends every running call."""
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
        """Runs a prompt and yields its deltas; only the last one has a finish reason.

        Closing the iterator cancels the generation; use `contextlib.aclosing` to close it at once. A generation that
        fails half-way raises, and is never repeated here.

        Args:
            request_id: unique among all active requests; the reservation's.
            model: served name, or one of the worker's adapters.
            token_ids: the prompt, at least one.
            max_tokens: shorthand for StopOptions(max_tokens=...).
            sampling: unset fields use the model's defaults.
            stop: stop conditions; unset: the worker's defaults. Not together with max_tokens.
            output: log-probabilities.
            guided: constraint of the output.
            lora: adapter name; empty for the base model.
            cache_salt: tenant salt, the same as in the reservation; empty for none.
            priority: lower runs first.
            data_parallel_rank: the reservation's; None lets the engine choose.
            disaggregation: the worker's part of a disaggregated request.
            trace: W3C trace context.
            timeout_s: for the whole generation.
        """
        if max_tokens is not None and stop is not None:
            raise ValueError("pass max_tokens or stop, not both")
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
                f"{self._connection.address} ended the generation without a finish reason; retry it on another worker.",
                code="stream_incomplete",
                retryable=True,
            )

    async def abort(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Cancels a request, started by any caller; returns False if it was not active."""
        request = AbortRequest(request_id=request_id)
        return (
            await self._connection.unary(methods.ABORT, request, self._timeout_s if timeout_s is None else timeout_s)
        ).found

    async def get_info(self, *, timeout_s: float | None = None) -> GetInfoResponse:
        """Returns the worker's card, engine and load."""
        return await self._connection.unary(
            methods.INFO, GetInfoRequest(), self._timeout_s if timeout_s is None else timeout_s
        )
