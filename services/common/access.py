"""Who may call: bearer tokens checked by servers and shown by clients.

mTLS is the other way and needs nothing here: `tls-require-client-cert` refuses strangers before any RPC.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings

from services.common.errors import ErrorKind, SluiceError
from services.common.grpc_errors import abort

log = logging.getLogger(__name__)

HEADER = "authorization"
SCHEME = "Bearer "
LOOK_EVERY_S = 1.0
OPEN_SERVICES = ("/grpc.health.", "/grpc.reflection.")


class AccessSettings(BaseSettings):
    """Who may call this service; both unset: everybody who reaches it."""

    token: SecretStr = Field(SecretStr(""), description="token that callers must show; empty: see tokens-file")
    tokens_file: Path | None = Field(
        None, description="file with one accepted token a line, read again when it changes, so that tokens can rotate"
    )
    open_health: bool = Field(True, description="health and reflection need no token")


class RouterTokenSettings(BaseSettings):
    """What callers of a router that wants a token show it; both unset: nothing."""

    router_token: SecretStr = Field(SecretStr(""), description="token to show the router")
    router_token_file: Path | None = Field(
        None, description="file whose first line is the token to show the router, read again when it changes"
    )


class TokenFile:
    """Tokens in a file, one a line; looked at again at most every second, so that they can be changed while it runs.

    A file that vanishes or cannot be read later changes nothing: what was read last is true. Reading a few lines takes
    microseconds; it must not be on a network file system.

    Raises:
        SluiceError: FAILED_PRECONDITION when it cannot be read at first, or holds no token.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked_at = time.monotonic()
        self._state: tuple[int, int, int] | None = None
        self._tokens: tuple[str, ...] = ()
        try:
            self._read()
        except OSError as error:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION, f"The token file {path} cannot be read: {error.strerror}."
            ) from error
        if not self._tokens:
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, f"The token file {path} holds no token.")

    @property
    def tokens(self) -> tuple[str, ...]:
        """What the file holds now."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            try:
                self._read()
            except OSError as error:
                log.warning("the token file cannot be read: %s", error.strerror, extra={"file": str(self._path)})
        return self._tokens

    def _read(self) -> None:
        found = os.stat(self._path)
        state = (found.st_mtime_ns, found.st_size, found.st_ino)
        if state == self._state:
            return
        lines = self._path.read_text("utf-8", "replace").splitlines()
        tokens = tuple(stripped for line in lines if (stripped := line.strip()))
        if tokens:
            self._tokens = tokens
        else:
            log.warning("the token file is empty; the tokens read last stay valid", extra={"file": str(self._path)})
        if self._state is not None:
            log.info("the token file was read again", extra={"file": str(self._path), "tokens": len(self._tokens)})
        self._state = state


Tokens = Callable[[], Iterable[str]]
"""The tokens that are valid now; for a client, the first is the one to show."""


def tokens_of(token: SecretStr, tokens_file: Path | None) -> Tokens | None:
    """Tokens as the settings give them, both kinds together; None when there are none.

    Raises:
        SluiceError: as TokenFile.
    """
    fixed = (token.get_secret_value(),) if token.get_secret_value() else ()
    if tokens_file is None:
        return (lambda: fixed) if fixed else None
    file = TokenFile(tokens_file)
    return lambda: (*fixed, *file.tokens)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid token, typed UNAUTHENTICATED.

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
        if handler is None or handler_call_details.method.startswith(self._open):
            return handler
        shown = [value for key, value in handler_call_details.invocation_metadata or () if key == HEADER]
        if len(shown) == 1 and self._valid(shown[0]):
            return handler
        return _refusal(handler, bool(shown))

    def _valid(self, shown: str | bytes) -> bool:
        text = shown.decode("ascii", "replace") if isinstance(shown, bytes) else shown
        if text[: len(SCHEME)].lower() != SCHEME.lower():
            return False
        digest = sha256(text[len(SCHEME) :].encode()).digest()
        # Every token is compared, digests in constant time: how long it takes tells nothing about any of them.
        matches = [hmac.compare_digest(digest, sha256(token.encode()).digest()) for token in self._tokens()]
        return any(matches)


def access_interceptors(settings: AccessSettings) -> list[grpc.aio.ServerInterceptor]:
    """What a server needs to check its callers; nothing when everybody may call."""
    tokens = tokens_of(settings.token, settings.tokens_file)
    return [] if tokens is None else [TokenInterceptor(tokens, settings.open_health)]


def shown_token(settings: RouterTokenSettings) -> Callable[[], str] | None:
    """Gives the token to show the router, or None; SluiceError as TokenFile."""
    tokens = tokens_of(settings.router_token, settings.router_token_file)
    return None if tokens is None else lambda: next(iter(tokens()))


def _refusal(handler: grpc.RpcMethodHandler[Any, Any], shown: bool) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same shape that refuses."""
    said = "The token is not valid here." if shown else "This service wants a token: send authorization: Bearer TOKEN."
    error = SluiceError(ErrorKind.UNAUTHENTICATED, said, code="invalid_token" if shown else "token_missing")

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
