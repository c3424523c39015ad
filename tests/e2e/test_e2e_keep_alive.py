"""Several requests on one connection, with bodies of a given length and in chunks, as proxies send them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import pytest

from tests.support.servers.suite import Suite

CHAT = {"model": "tekken", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def parts(text: bytes) -> Iterator[bytes]:
    yield text[:20]
    yield text[20:]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("chunked", [(True, True, True), (True, False, True), (False, True, False)])
def test_connection_serves_requests_after_a_chunked_body(suite: Suite, chunked: tuple[bool, ...], stream: bool) -> None:
    text = json.dumps({**CHAT, "stream": stream}).encode()
    connection = http.client.HTTPConnection(suite.url.removeprefix("http://"), timeout=20)
    headers = {"content-type": "application/json"}
    for in_chunks in chunked:
        body = parts(text) if in_chunks else text
        connection.request("POST", "/v1/chat/completions", body, headers, encode_chunked=in_chunks)
        answer = connection.getresponse()
        assert answer.status == 200
        assert (b"[DONE]" in answer.read()) is stream
    connection.close()
