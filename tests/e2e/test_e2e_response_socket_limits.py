"""Responses over WebSocket with API keys and tight limits: admission of turns, slow readers, the end of a gateway."""

from __future__ import annotations

import asyncio
import json
import signal
import socket as sockets
from collections.abc import Iterator

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from services.gateway.admission.keys import create, write
from tests.support.clients.response_socket import response_socket
from tests.support.servers.suite import Suite
from tests.support.waiting import until

FREE, FREE_RECORD = create("free")
TIGHT, TIGHT_RECORD = create("tight", requests_per_minute=2)
OTHER, OTHER_RECORD = create("other", models=["something-else"])
OPERATOR, OPERATOR_RECORD = create("operator", scopes=["operate"])
SHORT = {"input": "Hi.", "max_output_tokens": 4, "store": False}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    write(file, [FREE_RECORD, TIGHT_RECORD, OTHER_RECORD, OPERATOR_RECORD])
    env = {
        "SLUICE_GATEWAY_API_KEYS_FILE": str(file),
        "SLUICE_GATEWAY_WRITE_TIMEOUT_S": "2",
        "SLUICE_GATEWAY_MAX_UNSENT_KB": "16",
        "SLUICE_GATEWAY_COMMENT_EVERY_S": "1",
    }
    with Suite("--workers", "1", "--speedup", "100", env=env) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("key", "status"), [("", 401), ("wrong", 401), ("operator", 403)])
def test_a_handshake_without_a_key_that_may_infer_is_refused(suite: Suite, key: str, status: int) -> None:
    sent = OPERATOR if key == "operator" else key
    with pytest.raises(InvalidStatus) as refused, response_socket(suite.url, **bearer(sent)):
        pass
    assert refused.value.response.status_code == status


def test_turns_count_against_the_limits_of_their_key(suite: Suite) -> None:
    with response_socket(suite.url, **bearer(TIGHT)) as socket:
        kinds = [socket.turn(**SHORT)[-1]["type"] for _ in range(2)]
        [refused] = socket.turn(**SHORT)
    assert kinds == ["response.incomplete"] * 2
    assert (refused["type"], refused["status"]) == ("error", 429)
    assert int(refused["headers"]["retry-after"]) > 0
    assert refused["headers"]["x-ratelimit-remaining-requests"] == "0"
    assert refused["headers"]["x-request-id"]


def test_a_model_that_is_not_the_keys_is_refused_in_its_turn(suite: Suite) -> None:
    with response_socket(suite.url, **bearer(OTHER)) as socket:
        [refused] = socket.turn(**SHORT)
    assert (refused["status"], refused["error"]["code"]) == (403, "model_not_allowed")


def test_unstored_responses_of_another_connection_are_not_found(suite: Suite) -> None:
    with response_socket(suite.url, **bearer(FREE)) as one, response_socket(suite.url, **bearer(FREE)) as two:
        response = one.turn(**SHORT)[-1]["response"]
        [refused] = two.turn(**SHORT, previous_response_id=response["id"])
        assert refused["error"]["code"] == "previous_response_not_found"
        assert one.turn(**SHORT, previous_response_id=response["id"])[-1]["type"] == "response.incomplete"


def test_a_client_that_stops_reading_is_disconnected_beside_others(suite: Suite) -> None:
    def open_sockets() -> int:
        [gateway] = suite.processes("gateway")
        return sum(each.raddr == own for each in gateway.net_connections("tcp") if each.raddr)

    with response_socket(suite.url, **bearer(FREE)) as neighbour, sockets.socket() as slow:
        slow.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
        host, port = suite.url.removeprefix("http://").split(":")
        slow.connect((host, int(port)))
        own = slow.getsockname()
        body = {
            "type": "response.create",
            "model": "tekken",
            "input": "Hi.",
            "instructions": "river " * 30_000,  # which the first events repeat: more than all buffers hold
            "max_output_tokens": 10_000,
            "ignore_eos": True,
        }
        slow.sendall(handshake(suite.url, FREE))
        assert slow.recv(12) == b"HTTP/1.1 101"
        slow.sendall(text_frame(json.dumps(body).encode()))
        received = b""
        while b"response.created" not in received:
            received += slow.recv(64)
        assert open_sockets() == 1
        assert neighbour.turn(**SHORT)[-1]["type"] == "response.incomplete"
        asyncio.run(until(lambda: open_sockets() == 0, 120))
        assert neighbour.turn(**SHORT)[-1]["type"] == "response.incomplete"


def handshake(url: str, key: str) -> bytes:
    return (
        f"GET /v1/responses HTTP/1.1\r\nHost: {url.removeprefix('http://')}\r\nConnection: Upgrade\r\n"
        "Upgrade: websocket\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        f"Authorization: Bearer {key}\r\n\r\n"
    ).encode()


def text_frame(text: bytes) -> bytes:
    """A masked frame of at least 65,536 bytes of text, with a mask of zeros."""
    return b"\x81\xff" + len(text).to_bytes(8, "big") + b"\0\0\0\0" + text


def test_a_gateway_that_stops_ends_responses_first(suite: Suite) -> None:
    with response_socket(suite.url, **bearer(FREE)) as idle, response_socket(suite.url, **bearer(FREE)) as socket:
        socket.send(input="Hi.", max_output_tokens=2000, store=False, ignore_eos=True)
        assert socket.event()["type"] == "response.created"
        [gateway] = suite.processes("gateway")
        gateway.send_signal(signal.SIGTERM)
        assert socket.events()[-1]["type"] in ("response.incomplete", "response.completed")
        for ended in (idle, socket):
            with pytest.raises(ConnectionClosed) as closed:
                ended.event()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1012
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{suite.url}/health", timeout=5).raise_for_status()
