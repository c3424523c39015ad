"""Responses over WebSocket against a running suite: turns, limits, hostile messages and their neighbours."""

from __future__ import annotations

import json
import socket as sockets
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.support.clients.response_socket import ResponseSocket, response_socket
from tests.support.servers.suite import Suite
from tests.support.waiting import until

SHORT = {"max_output_tokens": 4, "store": False}


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    assert events[-1]["type"] != "error", events[-1]
    response: dict[str, Any] = events[-1]["response"]
    return response


def outcome_of(socket: ResponseSocket, text: str) -> str:
    """The status of the error event for a message, or `closed` if the connection is closed while it is sent."""
    try:
        socket.connection.send(text)
        return str(socket.event()["status"])
    except ConnectionClosed:
        return "closed"


def refused_status(url: str, **headers: str) -> int:
    """The HTTP status of a handshake that is refused."""
    with pytest.raises(InvalidStatus) as refused, response_socket(url, **headers):
        pass
    body = json.loads(refused.value.response.body or b"{}")
    assert body["error"]["message"]
    return refused.value.response.status_code


def test_turns_of_a_connection_without_store_continue_each_other(suite: Suite) -> None:
    lengths, previous = [], None
    with response_socket(suite.url) as socket:
        for turn in range(8):
            response = response_of(socket.turn(**SHORT, input=f"Turn {turn}.", previous_response_id=previous))
            lengths.append(response["usage"]["input_tokens"])
            previous = response["id"]
    assert lengths == sorted(set(lengths))
    assert httpx.get(f"{suite.url}/v1/responses/{previous}").status_code == 404


def test_a_stored_turn_of_a_connection_is_continued_over_http(suite: Suite) -> None:
    with response_socket(suite.url) as socket:
        first = response_of(socket.turn(input="Hi.", max_output_tokens=4))
    body = {"model": "tekken", "input": "More.", "previous_response_id": first["id"], "max_output_tokens": 4}
    assert httpx.post(f"{suite.url}/v1/responses", json=body, timeout=30).status_code == 200


def test_an_answer_over_websocket_is_that_over_http(suite: Suite) -> None:
    body = {"model": "tekken", "input": "Say <<<script: the same words.>>>"}
    over_http = httpx.post(f"{suite.url}/v1/responses", json=body, timeout=30).json()
    with response_socket(suite.url) as socket:
        over_socket = response_of(socket.turn(input=body["input"]))
    assert over_socket["output"][0]["content"] == over_http["output"][0]["content"]
    assert over_socket.keys() == over_http.keys()


def test_a_warm_up_without_output_is_continued(suite: Suite) -> None:
    with response_socket(suite.url) as socket:
        events = socket.turn(input=[], generate=False, store=False, instructions="Be brief.")
        assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.completed"]
        warm = response_of(events)
        assert warm["output"] == []
        response_of(socket.turn(**SHORT, input="Hi.", previous_response_id=warm["id"]))


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ("garbage", "invalid_request_error"),
        ("[]", "invalid_request_error"),
        ("", "invalid_request_error"),
        ("{}", "unknown_event"),
        ('{"type": "session.update"}', "unknown_event"),
        ('{"type": "response.create", "model": "tekken", "input": "a", "stream_id": "b"}', "unsupported_parameter"),
        ('{"type": "response.create", "model": "tekken", "input": "a", "background": true}', "unsupported_parameter"),
        ('{"type": "response.create", "model": "tekken", "input": "a", "generate": 1.5}', "invalid_value"),
        ('{"type": "response.create", "model": "unknown", "input": "a"}', "model_not_found"),
        (b"\x00\xff", "binary_message"),
        ("[" * 100_000, "budget_exceeded"),
    ],
)
def test_a_wrong_message_is_answered_with_an_error_event(suite: Suite, sent: str | bytes, code: str) -> None:
    with response_socket(suite.url) as socket:
        socket.connection.send(sent)
        event = socket.event()
        assert (event["type"], event["error"]["code"]) == ("error", code), event
        assert event["status"] in (400, 404)
        response_of(socket.turn(**SHORT, input="Hi."))


def test_a_message_in_fragments_is_one_message(suite: Suite) -> None:
    text = json.dumps({"type": "response.create", "model": "tekken", "input": "Häppy 💡" * 400, **SHORT})
    with response_socket(suite.url) as socket:
        socket.connection.send([text[index : index + 97] for index in range(0, len(text), 97)])
        response_of(socket.events())


def test_a_message_of_100_mb_ends_its_connection_only(suite: Suite) -> None:
    with response_socket(suite.url) as neighbour, response_socket(suite.url) as socket:
        neighbour.send(input="Hi.", max_output_tokens=200, store=False, ignore_eos=True)
        assert outcome_of(socket, "x" * (100 << 20)) in ("413", "closed")
        with pytest.raises(ConnectionClosed):
            socket.event()
        response_of(neighbour.events())


def test_a_message_while_a_response_is_in_progress_is_refused(suite: Suite) -> None:
    with response_socket(suite.url) as socket:
        socket.send(input="Hi.", max_output_tokens=400, ignore_eos=True)
        assert socket.event()["type"] == "response.created"
        socket.send(input="Hi again.", max_output_tokens=400, ignore_eos=True)
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] not in ("response.incomplete", "response.completed"):
            events.append(socket.event())
        refused = [event for event in events if event["type"] == "error"]
        assert [event["error"]["code"] for event in refused] == ["response_in_progress"]
        response_of(socket.turn(**SHORT, input="Hi."))


async def test_a_disconnect_cancels_the_generation(suite: Suite) -> None:
    def cancelled() -> float:
        text = httpx.get(f"{suite.url}/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if 'outcome="cancelled"' in line)

    before = cancelled()
    with response_socket(suite.url) as socket:
        socket.send(input="Hi.", max_output_tokens=20_000, ignore_eos=True)
        assert socket.event()["type"] == "response.created"
    await until(lambda: cancelled() > before)


def handshake(url: str, host: str = "", without: str = "", ends: str = "") -> bytes:
    """The first line of the response to a handshake.

    Args:
        host: the Host header; empty: that of the gateway.
        without: name of a header to leave out.
        ends: follows the handshake.
    """
    address = url.removeprefix("http://")
    headers = {
        "Host": host or address,
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec-WebSocket-Version": "13",
    }
    lines = [f"{name}: {value}\r\n" for name, value in headers.items() if name != without]
    name, port = address.split(":")
    with sockets.create_connection((name, int(port)), timeout=30) as raw:
        raw.sendall(f"GET /v1/responses HTTP/1.1\r\n{''.join(lines)}\r\n{ends}".encode())
        return raw.recv(1000).partition(b"\r\n")[0]


def test_a_handshake_from_another_site_is_refused(suite: Suite) -> None:
    assert refused_status(suite.url, Origin="https://evil.example.com") == 403
    assert handshake(suite.url, host="evil.example.com").startswith(b"HTTP/1.1 421")


@pytest.mark.parametrize(
    ("broken", "status"),
    [
        ({"without": "Sec-WebSocket-Key"}, b"400"),
        ({"without": "Sec-WebSocket-Version"}, b"400"),
        ({"without": "Host"}, b"400"),
        ({"without": "Connection"}, b"405"),
        ({"without": "Upgrade"}, b"405"),
        ({"host": "a..b"}, b"421"),
        ({"ends": "early"}, b"400"),
        ({}, b"101"),
    ],
)
def test_a_broken_handshake_is_refused(suite: Suite, broken: dict[str, str], status: bytes) -> None:
    assert handshake(suite.url, **broken).startswith(b"HTTP/1.1 " + status)


def test_get_of_responses_without_an_upgrade_is_not_found(suite: Suite) -> None:
    assert httpx.get(f"{suite.url}/v1/responses").status_code == 405


def test_an_invalid_frame_ends_its_connection_with_its_code(suite: Suite) -> None:
    with response_socket(suite.url) as neighbour, response_socket(suite.url) as socket:
        socket.connection.socket.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(ConnectionClosed) as closed:
            socket.event()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1002
        response_of(neighbour.turn(**SHORT, input="Hi."))


def test_an_item_reference_stands_for_the_stored_item(suite: Suite) -> None:
    body = {"model": "tekken", "input": "Hi.", "max_output_tokens": 6}
    first = httpx.post(f"{suite.url}/v1/responses", json=body, timeout=30).json()
    item = first["output"][0]
    conversation: list[Any] = [{"role": "user", "content": "Hi."}, None, {"role": "user", "content": "More."}]
    tokens = []
    for stands in (item, {"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
        conversation[1] = stands
        sent = {"model": "tekken", "input": conversation, "max_output_tokens": 6}
        tokens.append(httpx.post(f"{suite.url}/v1/responses", json=sent, timeout=30).json()["usage"]["input_tokens"])
    assert len(set(tokens)) == 1
    conversation[1] = {"type": "item_reference", "id": "msg_unknown"}
    unknown = httpx.post(f"{suite.url}/v1/responses", json={"model": "tekken", "input": conversation}, timeout=30)
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "input[1]")


def test_the_client_library_connects_and_continues(suite: Suite, client: Any) -> None:
    with client.responses.connect() as connection:
        connection.response.create(model="tekken", input="Hi.", max_output_tokens=4)
        kinds = []
        for event in connection:
            kinds.append(event.type)
            if event.type in ("response.completed", "response.incomplete"):
                break
    assert kinds[0] == "response.created"


def test_pings_are_answered(suite: Suite) -> None:
    with response_socket(suite.url) as socket:
        assert socket.connection.ping(b"here").wait(30)
        assert isinstance(socket, ResponseSocket)
