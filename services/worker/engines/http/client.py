"""Client of an engine's HTTP server: bounded responses, deadlines, and its errors as SluiceError."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from services.common.errors import ErrorKind, SluiceError, first_line, internal, invalid, overloaded
from services.common.security.file_watcher import WatchedFiles

if TYPE_CHECKING:
    import httpx

CONNECT_S = 5.0
CALL_S = 10.0
SILENCE_S = 600.0
"""Maximum seconds between two chunks of a stream; a gateway's deadline is usually shorter."""
MAX_RESPONSE_BYTES = 16 << 20
MAX_EVENT_BYTES = 32 << 20
MAX_KEY_BYTES = 4_096
MAX_MESSAGE = 500
MAX_IDLE_CONNECTIONS = 256

_DONE = b"[DONE]"


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
            transport=connections,
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    async def get_json(self, path: str) -> Any:
        """Returns the decoded body of a GET; raises SluiceError (NOT_FOUND: the server does not have the path)."""
        return _decoded(await self._call("GET", path))

    async def get(self, path: str) -> bytes:
        """Returns the body of a GET; raises SluiceError (NOT_FOUND: the server does not have the path)."""
        return await self._call("GET", path)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Returns the body of a POST; raises SluiceError."""
        return await self._call("POST", path, body)

    async def status(self, path: str, body: Mapping[str, Any]) -> int:
        """Returns the HTTP status of a POST; raises SluiceError when the server cannot be reached."""
        try:
            response = await self._client.post(path, **self._content(body, {}))
        except self._httpx.HTTPError as error:
            raise self._transport_error(error) from error
        return int(response.status_code)

    async def exists(self, path: str) -> bool:
        """Whether the server has a path, for any method; raises SluiceError when it cannot be reached."""
        try:
            return bool((await self._client.get(path, **self._content(None, {}))).status_code != 404)
        except self._httpx.HTTPError as error:
            raise self._transport_error(error) from error

    async def events(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yields the server-sent events of a POST, decoded; closing the iterator closes the connection.

        Raises:
            SluiceError: ENGINE_SHUTDOWN when the server cannot be reached or the connection breaks.
        """
        timeout = self._httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        request = self._client.build_request("POST", path, timeout=timeout, **self._content(body, headers))
        try:
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code != 200:
                    raise error_of_status(response.status_code, await _read_bounded(response))
                async with aclosing(_payloads(response)) as payloads:
                    async for payload in payloads:
                        yield _decoded(payload)
            finally:
                await response.aclose()
        except self._httpx.HTTPError as error:
            raise self._transport_error(error) from error

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        request = self._client.build_request(method, path, **self._content(body, {}))
        try:
            response = await self._client.send(request, stream=True)
            try:
                content = await _read_bounded(response)
            finally:
                await response.aclose()
        except self._httpx.HTTPError as error:
            raise self._transport_error(error) from error
        if response.status_code != 200:
            raise error_of_status(response.status_code, content)
        return content

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
            return SluiceError(ErrorKind.RESPONSE_TIMEOUT, "The engine's server does not respond.")
        return SluiceError(ErrorKind.ENGINE_SHUTDOWN, "The engine's server cannot be reached; retry on another worker.")


def error_of_status(status: int, content: bytes) -> SluiceError:
    """Converts the response of a failed call into a SluiceError."""
    return error_of(status, _message(content))


def error_of(status: int, message: str) -> SluiceError:
    """Converts an HTTP status and the server's message into a SluiceError."""
    reason = first_line(message, MAX_MESSAGE) or f"HTTP status {status}"
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
        return SluiceError(ErrorKind.RESPONSE_TIMEOUT, "The engine's server does not respond.")
    return internal("The engine's server failed on this request.")


def _message(content: bytes) -> str:
    """Returns the message of an error in the shapes of vLLM, SGLang and FastAPI."""
    try:
        body = orjson.loads(content)
    except ValueError:
        return content[:MAX_MESSAGE].decode(errors="replace").strip()
    for name in ("error", "message", "detail"):
        found = body.get(name) if isinstance(body, dict) else None
        if isinstance(found, dict):
            found = found.get("message")
        if isinstance(found, str):
            return found
        if found:
            return orjson.dumps(found).decode()
    return ""


async def _read_bounded(response: httpx.Response) -> bytes:
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > MAX_RESPONSE_BYTES:
            raise internal(f"A response of the engine's server is larger than {MAX_RESPONSE_BYTES >> 20} MiB.")
    return bytes(content)


async def _payloads(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yields the data of each server-sent event up to the last, and reads the body to its end.

    The connection can then serve the next request.
    """
    rest, done = b"", False
    async for part in response.aiter_bytes():
        *events, rest = (rest + part).split(b"\n\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise internal(f"An event of the engine's server is larger than {MAX_EVENT_BYTES >> 20} MiB.")
        for event in events:
            if not event.startswith(b"data:"):
                continue  # a keep-alive comment
            data = event[len(b"data:") :].strip()
            done = done or data == _DONE
            if not done:
                yield data


def _decoded(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except ValueError as error:
        raise internal("The engine's server sent a response that is not JSON.") from error


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
