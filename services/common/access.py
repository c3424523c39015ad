"""Who may call: bearer tokens checked by servers and shown by clients.

mTLS is the other way and needs nothing here: `tls-require-client-cert` refuses strangers before any RPC.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any

import grpc

from services.common.callers import may_call
from services.common.errors import ErrorKind, SluiceError
from services.common.grpc_errors import abort
from services.common.tokens import Token, Tokens, first_token, tokens_of
from services.common.trust import AccessSettings as AccessSettings
from services.common.trust import RouterTokenSettings as RouterTokenSettings

HEADER = "authorization"
SCHEME = "Bearer "
OPEN_SERVICES = ("/grpc.health.", "/grpc.reflection.")


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid token, typed UNAUTHENTICATED, and those that its caller may not make, typed
    PERMISSION_DENIED.

    Args:
        open_health: health and reflection may be called by anybody.
    """

    def __init__(self, tokens: Tokens, open_health: bool) -> None:
        self._tokens = tokens
        self._open = OPEN_SERVICES if open_health else ()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(self._open):
            return handler
        shown = [value for key, value in handler_call_details.invocation_metadata or () if key == HEADER]
        token = self._find(shown[0]) if len(shown) == 1 else None
        if token is None:
            return _refusing(handler, _unknown(bool(shown)))
        if token.caller and not may_call(token.caller, method):
            return _refusing(handler, _forbidden(token.caller, method))
        return handler

    def _find(self, shown: str | bytes) -> Token | None:
        text = shown.decode("ascii", "replace") if isinstance(shown, bytes) else shown
        if text[: len(SCHEME)].lower() != SCHEME.lower():
            return None
        digest = sha256(text[len(SCHEME) :].encode()).digest()
        # Every token is compared, digests in constant time: how long it takes tells nothing about any of them.
        found = [token for token in self._tokens() if hmac.compare_digest(digest, token.digest)]
        return found[0] if found else None


def access_interceptors(settings: AccessSettings) -> list[grpc.aio.ServerInterceptor]:
    """What a server needs to check its callers; nothing when everybody may call."""
    tokens = tokens_of(settings.token, settings.tokens_file)
    return [] if tokens is None else [TokenInterceptor(tokens, settings.open_health)]


def shown_token(settings: RouterTokenSettings) -> Callable[[], str] | None:
    """Gives the token to show the router, or None; SluiceError as TokenFile."""
    return first_token(settings.router_token, settings.router_token_file)


def _unknown(shown: bool) -> SluiceError:
    said = "The token is not valid here." if shown else "This service wants a token: send authorization: Bearer TOKEN."
    return SluiceError(ErrorKind.UNAUTHENTICATED, said, code="invalid_token" if shown else "token_missing")


def _forbidden(caller: str, method: str) -> SluiceError:
    rpc = method.rpartition(".")[2].replace("/", ".")
    return SluiceError(
        ErrorKind.PERMISSION_DENIED,
        f"The token is that of {caller}, which may not call {rpc}.",
        code="caller_not_allowed",
    )


def _refusing(handler: grpc.RpcMethodHandler[Any, Any], error: SluiceError) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same shape that refuses."""

    async def refuse(request: Any, context: Any) -> Any:
        await abort(context, error)

    shapes = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make: Any = shapes[handler.request_streaming, handler.response_streaming]
    refusing: grpc.RpcMethodHandler[Any, Any] = make(refuse, handler.request_deserializer, handler.response_serializer)
    return refusing
