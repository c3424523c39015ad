"""The kinds of requests that `count.py` counts: what is sent, and what has to come back."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import grpc

from services.common.base.packing import pack_u32
from sluice.v1 import ext_proc_pb2 as ext_proc
from sluice.v1 import router_pb2, router_pb2_grpc
from tests.support.clients.ext_proc import FULL_DUPLEX, header_map

WORDS = 150
MODEL = "counted"
PARSERS = {
    "SLUICE_POSTPROCESS_TOOL_PARSERS": f"{MODEL}=hermes",
    "SLUICE_POSTPROCESS_REASONING_PARSERS": f"{MODEL}=think",
}
"""Settings of the suite: what `CALL` is parsed with."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = '<think>Ask.</think><tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWER_WITHIN_S = 60.0


def prompts() -> Iterator[str]:
    """Yields prompts of `WORDS` words, each other words than the one before, so that no request finds its prefix."""
    chosen = random.Random(0)
    while True:
        yield " ".join(f"{chosen.choice('abcdefgh')}{chosen.randrange(10)}" for _ in range(WORDS))


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where requests go: the gateway's connection, kept alive, the router's stub, and the endpoint picker's method."""

    gateway: http.client.HTTPConnection
    router: router_pb2_grpc.RouterStub
    pick: grpc.StreamStreamMultiCallable[Any, Any]


Send = Callable[[Endpoints, str], None]


def _posted(path: str, body: Callable[[str], Mapping[str, Any]], tokens: int = 0, status: int = 200) -> Send:
    """Returns what posts a body for a prompt, and checks the status and how many tokens the usage reports."""

    def send(endpoints: Endpoints, prompt: str) -> None:
        content = json.dumps(body(prompt))
        endpoints.gateway.request("POST", path, content, {"content-type": "application/json"})
        answer = endpoints.gateway.getresponse()
        text = answer.read().decode()
        if answer.status != status:
            raise RuntimeError(f"{path} returned {answer.status} instead of {status}: {text[:500]}")
        written = f'"completion_tokens":{tokens},', f'"output_tokens":{tokens},'
        if tokens and not any(part in text.replace("}", ",").replace(" ", "") for part in written):
            raise RuntimeError(f"{path} did not return {tokens} tokens: {text[-500:]}")

    return send


def _chat(tokens: int, streamed: bool) -> Send:
    def body(prompt: str) -> Mapping[str, Any]:
        options = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        messages = [{"role": "user", "content": prompt}]
        return {"model": MODEL, "messages": messages, "max_tokens": tokens, "ignore_eos": True, **options}

    return _posted("/v1/chat/completions", body, tokens)


def _scripted(prompt: str) -> Mapping[str, Any]:
    text = f"{prompt} <<<script: {CALL}>>>"
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "tools": TOOLS, "stream": True}


def _completion(tokens: int, streamed: bool) -> Send:
    def body(prompt: str) -> Mapping[str, Any]:
        options = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **options}

    return _posted("/v1/completions", body, tokens)


def _responses(tokens: int) -> Send:
    fields = {"model": MODEL, "max_output_tokens": tokens, "stream": True, "store": False}
    return _posted("/v1/responses", lambda prompt: {**fields, "input": prompt}, tokens)


def _messages(tokens: int) -> Send:
    def body(prompt: str) -> Mapping[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {"model": MODEL, "max_tokens": tokens, "stream": True, "messages": messages}

    return _posted("/v1/messages", body, tokens)


def _route(endpoints: Endpoints, prompt: str) -> None:
    """Asks where a prompt of 4 token ids a word would run, without a reservation."""
    token_ids = pack_u32([ord(letter) for word in prompt.split() for letter in word * 2])
    request = router_pb2.RouteQueryRequest(
        mode=router_pb2.RouteQueryRequest.MODE_QUERY_ONLY, model=MODEL, prompt=router_pb2.PromptRef(token_ids=token_ids)
    )
    answer = endpoints.router.RouteQuery(request, timeout=ANSWER_WITHIN_S)
    if not answer.decode.worker_id:
        raise RuntimeError(f"RouteQuery named no worker: {answer}")


def _pick(endpoints: Endpoints, prompt: str) -> None:
    """Sends a chat and the first and last chunk of its response through the endpoint picker, as Envoy does."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "stream": True}
    text = json.dumps(body).encode()
    head = header_map({":method": "POST", ":path": "/v1/chat/completions", "content-length": str(len(text))})
    modes = ext_proc.ProtocolConfiguration(request_body_mode=FULL_DUPLEX, response_body_mode=FULL_DUPLEX)
    sent: SimpleQueue[Any] = SimpleQueue()
    answers = endpoints.pick(iter(sent.get, None), timeout=ANSWER_WITHIN_S)

    def exchange(expected: int, *requests: Mapping[str, Any]) -> None:
        for request in requests:
            sent.put(ext_proc.ProcessingRequest(**request))
        for _ in range(expected):
            if (answer := next(answers)).HasField("immediate_response"):
                raise RuntimeError(f"the picker refused the request: {answer}")

    content = ext_proc.HttpBody(body=text, end_of_stream=True)
    exchange(
        2, {"request_headers": ext_proc.HttpHeaders(headers=head), "protocol_config": modes}, {"request_body": content}
    )
    exchange(1, {"response_headers": ext_proc.HttpHeaders(headers=header_map({":status": "200"}))})
    exchange(1, {"response_body": ext_proc.HttpBody(body=b"data: {}\n\n")})
    exchange(1, {"response_body": ext_proc.HttpBody(body=b"data: [DONE]\n\n", end_of_stream=True)})
    sent.put(None)
    if list(answers):
        raise RuntimeError("the picker sends more than was asked for")


KINDS: Mapping[str, Send] = {
    "chat streamed, 8 tokens": _chat(8, True),
    "chat streamed, 128 tokens": _chat(128, True),
    "chat whole, 8 tokens": _chat(8, False),
    "chat whole, 128 tokens": _chat(128, False),
    "chat streamed, reasoning and a tool call": _posted("/v1/chat/completions", _scripted),
    "completion streamed, 8 tokens": _completion(8, True),
    "completion whole, 8 tokens": _completion(8, False),
    "Responses streamed, 8 tokens": _responses(8),
    "Messages streamed, 8 tokens": _messages(8),
    "embeddings": _posted("/v1/embeddings", lambda prompt: {"model": MODEL, "input": prompt}),
    "RouteQuery": _route,
    "endpoint picker": _pick,
    "refused: invalid field": _posted(
        "/v1/chat/completions", lambda prompt: {"model": MODEL, "messages": [], "max_tokens": prompt}, status=400
    ),
    "refused: unknown model": _posted(
        "/v1/chat/completions",
        lambda prompt: {"model": "no", "messages": [{"role": "user", "content": prompt}]},
        status=404,
    ),
    "refused: prompt too long": _posted(
        "/v1/chat/completions",
        lambda prompt: {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 1_000_000},
        status=400,
    ),
}
"""What is counted, by name."""


def endpoints_of(gateway: str, router: str, picker: str) -> Endpoints:
    """Returns the endpoints at host:port of a gateway, a router and an endpoint picker."""
    return Endpoints(
        http.client.HTTPConnection(gateway, timeout=ANSWER_WITHIN_S),
        router_pb2_grpc.RouterStub(grpc.insecure_channel(router)),
        grpc.insecure_channel(picker).stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=ext_proc.ProcessingRequest.SerializeToString,
            response_deserializer=ext_proc.ProcessingResponse.FromString,
        ),
    )
