"""What the picker writes without protobuf objects is what protobuf reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from services.router.picker import messages
from services.router.picker.picker import PickedEndpoint
from services.router.scheduling.route_headers import DESTINATION, ROUTE_HEADERS
from sluice.v1 import ext_proc_pb2 as ext_proc

SIZES = [0, 1, 100, 127, 128, 16_383, 16_384, 61_999, 62_000, 62_001, 124_000, 1_200_000]
NAMES = st.text("abcdefgh-", min_size=1, max_size=20)


def read(sent: Iterable[bytes]) -> list[Any]:
    """Returns the responses in what is sent."""
    return [ext_proc.ProcessingResponse.FromString(each) for each in sent]


def parts(responses: list[Any], kind: str) -> list[tuple[bytes, bool]]:
    """Returns the parts of a body and whether each is the last."""
    streamed = [getattr(each, kind).response.body_mutation.streamed_response for each in responses]
    assert {each.WhichOneof("response") for each in responses} == {kind}
    return [(each.body, each.end_of_stream) for each in streamed]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("end", [False, True])
def test_chunk_of_a_response_is_passed_on_whole_in_parts(size: int, end: bool) -> None:
    body = bytes(number & 255 for number in range(size))
    found = parts(read(messages.streamed(messages.RESPONSE_BODY, body, end)), "response_body")
    assert b"".join(part for part, _ in found) == body
    assert [last for _, last in found] == [False] * (len(found) - 1) + [end]
    assert max(len(part) for part, _ in found) <= messages.CHUNK
    assert len(found) == max(-(-size // messages.CHUNK), 1)


@given(st.dictionaries(NAMES, st.text(st.characters(max_codepoint=255), max_size=300), max_size=5), st.binary())
def test_choice_sets_headers_metadata_and_body(headers: dict[str, str], body: bytes) -> None:
    pick = PickedEndpoint(("a:1", "b:2"), {**headers, DESTINATION: "a:1,b:2"}, body)
    first, *rest = read(messages.picked(pick))
    common = first.request_headers.response
    assert common.clear_route_cache
    given_headers = {
        each.header.key: each.header.raw_value.decode("latin-1") for each in common.header_mutation.set_headers
    }
    length = {"content-length": str(len(body))} if body else {}
    assert given_headers == pick.headers | length
    assert {each.append_action for each in common.header_mutation.set_headers} == {
        ext_proc.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    }
    assert list(common.header_mutation.remove_headers) == [name for name in ROUTE_HEADERS if name not in pick.headers]
    assert MessageToDict(first.dynamic_metadata) == {"envoy.lb": {DESTINATION: "a:1,b:2"}}
    assert (b"".join(part for part, _ in parts(rest, "request_body")) if rest else b"") == body


def test_degraded_choice_marks_the_response() -> None:
    pick = PickedEndpoint(("a:1",), {DESTINATION: "a:1"}, b"", degraded="tokenizing_late")
    (marked,) = read([messages.response_headers(pick, ext_proc.HttpHeaders())])
    (option,) = marked.response_headers.response.header_mutation.set_headers
    assert (option.header.key, option.header.raw_value) == ("x-sluice-degraded", b"tokenizing_late")
    (plain,) = read([messages.response_headers(PickedEndpoint(("a:1",), {}, b""), ext_proc.HttpHeaders())])
    assert plain.HasField("response_headers")
    assert not plain.response_headers.response.header_mutation.set_headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(":status", b"404", "")], "404"),
        ([(":status", b"", "503")], "503"),
        ([("x", b"1", "")], "200"),
    ],
)
def test_status_of_a_response_is_read(headers: list[tuple[str, bytes, str]], status: str) -> None:
    values = [ext_proc.HeaderValue(key=key, raw_value=raw, value=value) for key, raw, value in headers]
    message = ext_proc.HttpHeaders(headers=ext_proc.HeaderMap(headers=values))
    assert messages.status_of(message) == status
