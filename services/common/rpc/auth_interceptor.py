"""Authenticates callers by token and certificate, and authorizes each RPC with `rpc_policy`."""

from __future__ import annotations

import hmac
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from hashlib import sha256
from typing import Any, TypeAlias

import grpc

from services.common.base.errors import ErrorKind, SluiceError
from services.common.net.addresses import listens_on_loopback
from services.common.rpc.errors import abort
from services.common.security import identity
from services.common.security.bearer_tokens import AcceptedToken, AcceptedTokens, accepted_tokens
from services.common.security.identity import Caller
from services.common.security.rpc_policy import may_call
from services.common.settings.service import GrpcServiceSettings

log = logging.getLogger(__name__)

HEADER = "authorization"
SCHEME = "Bearer "
OPEN_SERVICES = ("/grpc.health.", "/grpc.reflection.")
_URIS = "peer_uri"  # gRPC's key for the certificate's URI alternative names

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class CallerCheck:
    """Authenticates a caller and checks that it may call an RPC, over whatever transport.

    A caller with a token and a certificate needs both to allow the call.

    Args:
        tokens: the accepted tokens; None accepts calls without a token.
        trust_domain: of the names in verified client certificates; empty ignores certificates.
    """

    def __init__(self, tokens: AcceptedTokens | None, trust_domain: str) -> None:
        self._tokens = tokens
        self._trust_domain = trust_domain

    def admit(self, method: str, headers: Sequence[str | bytes], uris: Sequence[str]) -> Caller:
        """Returns the caller of `method`.

        Args:
            headers: values of the authorization header.
            uris: URI alternative names of the verified client certificate.

        Raises:
            SluiceError: UNAUTHENTICATED (`token_missing`, `invalid_token`) or PERMISSION_DENIED (`caller_unnamed`,
                `caller_not_allowed`).
        """
        callers = []
        if self._tokens is not None:
            callers.append(_by_token(self._tokens(), headers))
        if self._trust_domain:
            callers.append(_by_certificate(uris, self._trust_domain))
        for caller in callers:
            if not may_call(caller.service, method):
                raise _not_allowed(caller, method)
        if len(callers) < 2:
            return callers[0]
        token, certificate = callers
        proven = identity.both(token, certificate)
        if proven is None:
            raise _not_allowed(token, method)
        return proven


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Rejects unknown callers (UNAUTHENTICATED) and calls their caller may not make (PERMISSION_DENIED).

    Other calls are served with `identity.current` set.

    Args:
        tokens, trust_domain: see CallerCheck.
        open_health: whether health and reflection are served to every caller.
    """

    def __init__(self, tokens: AcceptedTokens | None, trust_domain: str, open_health: bool) -> None:
        self._check = CallerCheck(tokens, trust_domain)
        self._open = OPEN_SERVICES if open_health else ()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(self._open):
            return handler
        headers = [value for key, value in handler_call_details.invocation_metadata or () if key == HEADER]
        return _guarded(handler, lambda context: self.admit(method, headers, context))

    def admit(self, method: str, headers: Sequence[str | bytes], context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
        """Returns the caller of `method`; arguments and errors as for CallerCheck.admit."""
        names = () if context is None else context.auth_context().get(_URIS, ())
        return self._check.admit(method, headers, [uri.decode("utf-8", "replace") for uri in names])


def caller_check(settings: GrpcServiceSettings) -> CallerCheck | None:
    """Returns the check of callers; None where every caller is served. Raises SluiceError, see accepted_tokens."""
    tokens = accepted_tokens(settings.token, settings.tokens_file)
    trust_domain = settings.tls_trust_domain if settings.tls_require_client_cert else ""
    return None if tokens is None and not trust_domain else CallerCheck(tokens, trust_domain)


def access_interceptors(settings: GrpcServiceSettings) -> list[grpc.aio.ServerInterceptor]:
    """Returns the interceptors that authenticate callers; none where every caller is served.

    Raises:
        SluiceError: see accepted_tokens.
    """
    tokens = accepted_tokens(settings.token, settings.tokens_file)
    trust_domain = settings.tls_trust_domain if settings.tls_require_client_cert else ""
    if tokens is None and not trust_domain:
        return []
    if settings.token.get_secret_value() and not listens_on_loopback(settings.listen):
        log.warning(
            "--token is shared by all callers and meant for development; use --tokens-file for one token per caller"
        )
    return [AccessInterceptor(tokens, trust_domain, settings.open_health)]


def _by_token(tokens: Sequence[AcceptedToken], headers: Sequence[str | bytes]) -> Caller:
    if not headers:
        raise _unauthenticated('Missing token; send it as "authorization: Bearer TOKEN".', "token_missing")
    text = headers[0].decode("ascii", "replace") if isinstance(headers[0], bytes) else headers[0]
    digest = sha256(text[len(SCHEME) :].encode()).digest()
    # Compare with every token in constant time, so that timing reveals nothing.
    matches = [token.caller for token in tokens if hmac.compare_digest(digest, token.digest)]
    if len(headers) > 1 or text[: len(SCHEME)].lower() != SCHEME.lower() or not matches:
        raise _unauthenticated("Invalid token; send one that this service accepts.", "invalid_token")
    return matches[0]


def _by_certificate(uris: Sequence[str], trust_domain: str) -> Caller:
    caller = identity.of_certificate([*uris], trust_domain)
    if caller is None:
        raise SluiceError(
            ErrorKind.PERMISSION_DENIED,
            "The certificate does not name a caller; issue one with exactly one URI alternative name "
            f"spiffe://{trust_domain}/SERVICE or spiffe://{trust_domain}/worker/ID.",
            code="caller_unnamed",
        )
    return caller


def _unauthenticated(message: str, code: str) -> SluiceError:
    return SluiceError(ErrorKind.UNAUTHENTICATED, message, code=code)


def _not_allowed(caller: Caller, method: str) -> SluiceError:
    rpc = method.rpartition(".")[2].replace("/", ".")
    return SluiceError(
        ErrorKind.PERMISSION_DENIED,
        f"{caller.name} is not allowed to call {rpc}.",
        code="caller_not_allowed",
    )


def _guarded(handler: Handler, admit: Callable[[Any], Caller]) -> Handler:
    """Returns a handler of the same shape that authenticates its caller first.

    Writes a generator's messages itself, which keeps their cost the same as without the wrapper.
    """
    serve_call: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

    async def serve(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            caller = admit(context)
        except SluiceError as error:
            await abort(context, error)
        identity.current.set(caller)
        served = serve_call(request, context)
        if not inspect.isasyncgen(served):
            return await served
        async with aclosing(served) as messages:
            async for message in messages:
                await context.write(message)
        return None

    shapes = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make: Any = shapes[handler.request_streaming, handler.response_streaming]
    guarded: Handler = make(serve, handler.request_deserializer, handler.response_serializer)
    return guarded
