"""Client of an engine's HTTP server: bounded responses, deadlines, and its errors as SluiceError."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from services.common.base.errors import ErrorKind, SluiceError, first_line, internal, invalid, overloaded
from services.common.security.file_watcher import WatchedFiles
from services.worker.engines.http import answers

if TYPE_CHECKING:
    import httpx

CONNECT_S = 5.0
CALL_S = 10.0
"""Maximum seconds of a complete call, however its response arrives."""
SILENCE_S = 600.0
"""Maximum seconds until a stream begins and between two chunks of it; a gateway's deadline is usually shorter."""
MAX_KEY_BYTES = 4_096
"""Bytes of the file with the key of an engine's server; with a longer one the worker does not start."""
MAX_IDLE_CONNECTIONS = 256
"""Idle connections to an engine's server that are kept; further ones are closed."""


class HttpClient:
    """Calls one server.

    Args:
        url: http(s)://host:port.
        api_key_file: file with the server's API key; empty: the server requires none.
        connections: replaces the connections to the server, in tests.

    Raises:
        SluiceError: FAILED_PRECONDITION when httpx is not installed, INVALID_ARGUMENT when the key cannot be read.
    """

    def __init__(self, url: str, api_key_file: str = "", connections: httpx.AsyncBaseTransport | None = None) -> None:
        try:
            import httpx
        except ImportError as error:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION, "The engine http needs httpx: install sluice-llm[http].", param="engine"
            ) from error
        self._httpx = httpx
        self._key = None if not api_key_file else _watched_key(Path(api_key_file))
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(CALL_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=MAX_IDLE_CONNECTIONS),
            trust_env=False,  # an engine is never behind the proxy of the environment
            follow_redirects=False,
            headers={"Accept-Encoding": "identity"},
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # keeps none, however many a server sets
            transport=connections,
        )
        self._streams = answers.EventStreams()

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    async def get_json(self, path: str) -> Any:
        """Returns the decoded body of a GET; raises SluiceError (NOT_FOUND: the server does not have the path)."""
        return await answers.parse(await self._call("GET", path))

    async def get(self, path: str) -> bytes:
        """Returns the body of a GET; raises SluiceError (NOT_FOUND: the server does not have the path)."""
        return await self._call("GET", path)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Returns the body of a POST; raises SluiceError."""
        return await self._call("POST", path, body)

    async def status(self, path: str, body: Mapping[str, Any]) -> int:
        """Returns the HTTP status of a POST; raises SluiceError when the server cannot be reached."""
        async with self._response("POST", path, body) as response:
            return int(response.status_code)

    async def exists(self, path: str) -> bool:
        """Whether the server has a path, for any method; raises SluiceError when it cannot be reached."""
        async with self._response("GET", path) as response:
            return bool(response.status_code != 404)

    async def events(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yields the server-sent events of a POST, decoded; closing the iterator closes the connection.

        Raises:
            SluiceError: ENGINE_SHUTDOWN when the server cannot be reached or the connection breaks; INTERNAL when it
                sends more than `answers` allows.
        """
        timeout = self._httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        request = self._client.build_request("POST", path, timeout=timeout, **self._content(body, headers))
        try:
            async with asyncio.timeout(SILENCE_S):
                response = await self._client.send(request, stream=True)
            try:
                answers.check_encoding(response)
                if response.status_code != 200:
                    async with asyncio.timeout(CALL_S):
                        content = await answers.read_error(response)
                    raise error_of_status(response.status_code, content)
                async with aclosing(self._streams.payloads(response)) as payloads:
                    async for payload in payloads:
                        yield await answers.parse_object(payload)
            finally:
                await response.aclose()
        except TimeoutError as error:
            raise _silent() from error
        except self._httpx.HTTPError as error:
            raise self._transport_error(error) from error

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        async with self._response(method, path, body) as response:
            if response.status_code != 200:
                raise error_of_status(response.status_code, await answers.read_error(response))
            return await answers.read_body(response)

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Provides a response whose body is not read yet, for CALL_S seconds; closes it."""
        request = self._client.build_request(method, path, **self._content(body, {}))
        try:
            async with asyncio.timeout(CALL_S):
                response = await self._client.send(request, stream=True)
                try:
                    answers.check_encoding(response)
                    yield response
                finally:
                    await response.aclose()
        except TimeoutError as error:
            raise _silent() from error
        except self._httpx.HTTPError as error:
            raise self._transport_error(error) from error

    def _content(self, body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> dict[str, Any]:
        sent = dict(headers)
        if self._key is not None:
            sent["Authorization"] = f"Bearer {self._key.value}"
        if body is None:
            return {"headers": sent}
        return {
            "headers": {**sent, "Content-Type": "application/json"},
            "content": orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS),
        }

    def _transport_error(self, error: httpx.HTTPError) -> SluiceError:
        if isinstance(error, self._httpx.TimeoutException) and not isinstance(error, self._httpx.ConnectTimeout):
            return _silent()
        return SluiceError(ErrorKind.ENGINE_SHUTDOWN, "The engine's server cannot be reached; retry on another worker.")


class RequestFailedError(SluiceError):
    """The server failed on a request without saying why."""

    def __init__(self) -> None:
        super().__init__(ErrorKind.INTERNAL, "The engine's server failed on this request.")


def error_of_status(status: int, content: bytes) -> SluiceError:
    """Converts the response of a failed call into a SluiceError."""
    return error_of(status, answers.message_of(content))


def error_of(status: int, message: str) -> SluiceError:
    """Converts an HTTP status and the server's message into a SluiceError."""
    reason = first_line(message, answers.MAX_MESSAGE) or f"HTTP status {status}"
    if status in (400, 422):
        return invalid(f"The engine's server rejected the request: {reason}")
    if status in (401, 403):
        # The server's message may repeat the key.
        return internal("The engine's server did not accept the worker's API key; check its option api_key_file.")
    if status == 404:
        return SluiceError(ErrorKind.NOT_FOUND, f"The engine's server does not have this: {reason}")
    if status == 413:
        return SluiceError(ErrorKind.TOO_LARGE, f"The engine's server rejected the request as too large: {reason}")
    if status in (429, 503):
        return overloaded("The engine's server is overloaded; try again later.")
    if status in (408, 504):
        return _silent()
    if 300 <= status < 400:
        return internal("The engine's server redirects the request, which is not followed; set its final address.")
    return RequestFailedError() if status == 500 else internal("The engine's server failed on this request.")


def _silent() -> SluiceError:
    return SluiceError(ErrorKind.RESPONSE_TIMEOUT, "The engine's server does not respond.")


def _watched_key(path: Path) -> WatchedFiles[str]:
    return WatchedFiles("The file with the engine's API key", [path], lambda: _read_key(path))


def _read_key(path: Path) -> str:
    try:
        with path.open("rb") as file:
            key = file.read(MAX_KEY_BYTES + 1).strip().decode("ascii")
    except OSError as error:
        raise _bad_key(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _bad_key(path, "is not ASCII text") from error
    if not key or len(key) > MAX_KEY_BYTES or not key.isprintable():
        raise _bad_key(path, "does not contain one key on one line")
    return key


def _bad_key(path: Path, problem: str) -> SluiceError:
    return invalid(f"The file {path} with the engine's API key {problem}.", param="engine_args")
