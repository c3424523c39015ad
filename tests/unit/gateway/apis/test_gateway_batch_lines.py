"""Lines of batches and forms of uploads, right and wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.apis.batches.lines import BatchLine, LineError, read_lines
from services.gateway.apis.batches.multipart import FormPart, read_form
from tests.support.oracles.errors import raises_error

PATH = "/v1/completions"


def line(custom_id: Any = "a", **fields: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": PATH, "body": {}, **fields}).encode()


def test_lines_are_requests_in_their_order() -> None:
    data = b"\n".join([line("a", body={"model": "m"}), b"", line("b"), b"  "])
    assert read_lines(data, PATH, 1_000) == [BatchLine("a", {"model": "m"}), BatchLine("b", {})]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[]", "invalid_json_line"),
        (b"\xff\xfe", "invalid_json_line"),
        (line(None), "invalid_custom_id"),
        (line(""), "invalid_custom_id"),
        (line("x" * 513), "invalid_custom_id"),
        (line("first"), "duplicate_custom_id"),
        (line(method="GET"), "invalid_method"),
        (line(url="/v1/embeddings"), "invalid_url"),
        (line(url="http://other/v1/completions"), "invalid_url"),
        (line(body="text"), "invalid_body"),
        (line(body={"stream": True}), "invalid_body"),
        (line(pad="x" * 1_000), "line_too_large"),
    ],
)
def test_broken_line_is_an_error_of_its_own(text: bytes, code: str) -> None:
    found = read_lines(b"\n".join([line("first"), text, line("last")]), PATH, 1_000)
    assert [type(each) for each in found] == [BatchLine, LineError, BatchLine]
    broken = found[1]
    assert isinstance(broken, LineError)
    assert broken.code == code
    shown = json.loads(broken.as_result(1))
    assert (shown["response"], shown["error"]["code"], shown["error"]["line"]) == (None, code, 2)


def form(*parts: tuple[str, bytes], boundary: str = "XX") -> bytes:
    written = [
        f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + data for head, data in parts
    ]
    return b"\r\n".join(written) + f"\r\n--{boundary}--\r\n".encode()


def test_form_is_read_byte_for_byte() -> None:
    data = b"\r\n\n--XY\x00\xff--XX?\r\n"
    body = form(('name="purpose"', b"batch"), ('filename="a name.jsonl"; name="file"', data))
    assert read_form(body, "multipart/form-data; boundary=XX") == {
        "purpose": FormPart("", b"batch"),
        "file": FormPart("a name.jsonl", data),
    }
    quoted = read_form(form(('name="purpose"', b"x"), boundary="a b"), 'multipart/form-data; boundary="a b"')
    assert quoted["purpose"].content == b"x"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"{}", "application/json"),
        (form(('name="a"', b"")), "multipart/form-data"),
        (b"", "multipart/form-data; boundary=XX"),
        (b"--XX--", "multipart/form-data; boundary=XX"),
        (form(('name="a"', b""))[:-8], "multipart/form-data; boundary=XX"),
        (form(("nameless", b"")), "multipart/form-data; boundary=XX"),
        (form(*[('name="a"', b"")] * 40), "multipart/form-data; boundary=XX"),
        (b"garbage" + form(('name="a"', b"")), "multipart/form-data; boundary=XX"),
    ],
)
def test_malformed_form_is_refused(body: bytes, content_type: str) -> None:
    if body == b"--XX--":
        assert read_form(body, content_type) == {}
        return
    with raises_error(param="file"):
        read_form(body, content_type)
