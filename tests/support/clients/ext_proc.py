"""A client of ExternalProcessor that sends what Envoy's ext_proc filter sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import struct_pb2

from sluice.v1 import ext_proc_pb2 as ext_proc

DESTINATION = "x-gateway-destination-endpoint"
FULL_DUPLEX = ext_proc.ProtocolConfiguration.FULL_DUPLEX_STREAMED
TIMEOUT_S = 20


@dataclass
class Answered:
    """What the picker made of a request: where it goes, or with what it is rejected."""

    headers: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""
    parts: list[int] = field(default_factory=list)
    status: int = 0
    error: bytes = b""

    @property
    def endpoints(self) -> list[str]:
        """The endpoints to try, in order; header and metadata must agree."""
        listed = self.headers.get(DESTINATION, "")
        assert self.metadata.get("envoy.lb", {}).get(DESTINATION, "") == listed
        return listed.split(",") if listed else []


class Exchange:
    """One HTTP request and its response through the picker."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=ext_proc.ProcessingRequest.SerializeToString,
            response_deserializer=ext_proc.ProcessingResponse.FromString,
        )()

    async def send(self, **message: Any) -> None:
        """Sends one message."""
        await self.call.write(ext_proc.ProcessingRequest(**message))

    async def read(self) -> Any:
        """Returns the next response; grpc.aio.EOF at the end of the stream."""
        return await asyncio.wait_for(self.call.read(), TIMEOUT_S)

    async def request(
        self,
        body: Any,
        headers: Mapping[str, str] | None = None,
        path: str = "/v1/chat/completions",
        subset: str | Sequence[str] | None = None,
        chunk: int = 65_536,
        repeated_ends: int = 0,
        mode: ext_proc.ProtocolConfiguration.BodySendMode.ValueType = FULL_DUPLEX,
        method: str = "POST",
    ) -> Answered:
        """Sends a request and returns the picker's answer.

        Args:
            body: bytes, or an object to send as JSON; b"" for a request without a body.
            subset: the subset hint in the metadata; None: none.
            repeated_ends: ends of the stream sent again after the first, as Envoy does.
        """
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        every = {":method": method, ":path": path, "content-length": str(len(text)), **(headers or {})}
        metadata = subset_metadata(subset)
        await self.send(
            request_headers=ext_proc.HttpHeaders(headers=header_map(every), end_of_stream=not text),
            protocol_config=ext_proc.ProtocolConfiguration(request_body_mode=mode, response_body_mode=mode),
            metadata_context=metadata,
        )
        answering = asyncio.ensure_future(self.answer(bool(text)))
        try:
            for start in range(0, len(text), chunk):
                part = text[start : start + chunk]
                end = start + chunk >= len(text)
                await self.send(request_body=ext_proc.HttpBody(body=part, end_of_stream=end))
            for _ in range(repeated_ends):
                await self.send(request_body=ext_proc.HttpBody(end_of_stream=True))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # rejected before the end of its body
        return await answering

    async def answer(self, has_body: bool = True) -> Answered:
        """Reads the picker's answer to a request."""
        answered = Answered()
        while (message := await self.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("response")
            if kind == "immediate_response":
                immediate = message.immediate_response
                answered.status, answered.error = immediate.status.code, immediate.body
                answered.headers = set_headers(immediate.headers)
                return answered
            if kind == "request_headers":
                common = message.request_headers.response
                assert common.clear_route_cache
                answered.headers = set_headers(common.header_mutation)
                answered.removed = list(common.header_mutation.remove_headers)
                answered.metadata = plain(message.dynamic_metadata)
                if not has_body:
                    return answered
            if kind == "request_body":
                part = message.request_body.response.body_mutation.streamed_response
                answered.body += part.body
                answered.parts.append(len(part.body))
                if part.end_of_stream:
                    return answered
        raise AssertionError("the picker ended the stream without an answer")

    async def respond(
        self,
        chunks: Sequence[bytes],
        status: int = 200,
        served: str = "",
        upstream: str = "",
        trailers: bool = False,
        content_type: str = "text/event-stream",
        open_end: bool = False,
        extra: Mapping[str, str] | None = None,
    ) -> tuple[dict[str, str], bytes]:
        """Sends a response; returns the headers that the picker sets and the body that it passes on.

        Args:
            served: endpoint that served the request, as in the metadata of the extension's protocol.
            upstream: the same, as an attribute of Envoy.
            open_end: do not end the response.
            extra: further headers.
        """
        metadata = None
        if served:
            value = struct_pb2.Struct()
            value.update({f"{DESTINATION}-served": served})
            metadata = ext_proc.Metadata(filter_metadata={"envoy.lb": value})
        attributes = {}
        if upstream:
            attributes["envoy.filters.http.ext_proc"] = struct_pb2.Struct(
                fields={"upstream.address": struct_pb2.Value(string_value=upstream)}
            )
        headers = header_map({":status": str(status), "content-type": content_type, **(extra or {})})
        ends = not chunks and not trailers and not open_end
        await self.send(
            response_headers=ext_proc.HttpHeaders(headers=headers, end_of_stream=ends),
            metadata_context=metadata,
            attributes=attributes,
        )
        answer = await self.read()
        assert answer.WhichOneof("response") == "response_headers"
        found, body = set_headers(answer.response_headers.response.header_mutation), b""
        for number, chunk in enumerate(chunks, 1):
            end = number == len(chunks) and not trailers and not open_end
            body += await self.response_chunk(chunk, end)
        if trailers:
            await self.send(response_trailers=ext_proc.HttpTrailers())
            assert (await self.read()).WhichOneof("response") == "response_trailers"
        return found, body

    async def response_chunk(self, chunk: bytes, end: bool = False) -> bytes:
        """Sends a chunk of a response; returns what the picker passes on."""
        await self.send(response_body=ext_proc.HttpBody(body=chunk, end_of_stream=end))
        passed = b""
        while True:
            answer = await self.read()
            assert answer.WhichOneof("response") == "response_body"
            part = answer.response_body.response.body_mutation.streamed_response
            assert len(part.body) <= 62_000
            passed += bytes(part.body)
            if len(passed) == len(chunk):
                assert part.end_of_stream == end
                return passed

    async def end(self) -> None:
        """Ends the stream as Envoy does when the response is complete."""
        await self.call.done_writing()
        while await self.read() is not grpc.aio.EOF:
            continue

    def cut(self) -> None:
        """Breaks the stream off, as Envoy does when the client leaves."""
        self.call.cancel()


def header_map(headers: Mapping[str, str]) -> Any:
    """Returns the headers in Envoy's form: values as raw bytes."""
    return ext_proc.HeaderMap(
        headers=[ext_proc.HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()]
    )


def subset_metadata(subset: str | Sequence[str] | None) -> Any:
    """Returns the metadata that restricts a request to a subset: a string with commas, or a list."""
    if subset is None:
        return None
    value = struct_pb2.Struct()
    value.update({f"{DESTINATION}-subset": subset if isinstance(subset, str) else list(subset)})
    return ext_proc.Metadata(filter_metadata={"envoy.lb.subset_hint": value})


def set_headers(mutation: Any) -> dict[str, str]:
    """Returns the headers that a mutation sets."""
    return {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}


def plain(struct: Any) -> dict[str, Any]:
    """Returns a Struct of strings and Structs as a dict."""
    return {
        key: plain(value.struct_value) if value.HasField("struct_value") else value.string_value
        for key, value in struct.fields.items()
    }
