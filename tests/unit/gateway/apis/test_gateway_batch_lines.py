"""Lines of batches and forms of uploads, right and wrong."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.base.budgets import Budget
from services.common.net.intake.pace import BodyPace
from services.gateway.admission.scopes import Scope
from services.gateway.apis.batches import lines as lines_module
from services.gateway.apis.batches.lines import (
    BatchLine,
    CheckedLines,
    FileLost,
    LineError,
    Read,
    count_lines,
    line_parser,
    raw_lines,
    read_line,
)
from services.gateway.apis.batches.multipart import FormPart, read_form
from services.gateway.http.middleware.scopes import BodyNeeds
from tests.support.oracles.errors import raises_error

PATH = "/v1/completions"
PARSE = line_parser(Budget("body_values", 2_000, ""), BodyPace())


def line(custom_id: Any = "a", **fields: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": PATH, "body": {}, **fields}).encode()


async def checked(data: bytes, max_bytes: int = 1_000, max_broken: int = 10) -> CheckedLines:
    found = CheckedLines()
    await found.check(raw_lines(reader(data), max_bytes), PATH, max_bytes, max_broken, PARSE)
    return found


async def requests(data: bytes, max_bytes: int = 1_000) -> list[BatchLine | LineError]:
    return [await read_line(raw, PATH, max_bytes, PARSE) async for raw in raw_lines(reader(data), max_bytes)]


def reader(data: bytes) -> Read:
    async def read(start: int, size: int) -> bytes | None:
        return data[start : start + size]

    return read


async def test_lines_are_requests_in_their_order() -> None:
    data = b"\n".join([line("a", body={"model": "m", "priority": 3}), b"", line("b"), b"  "])
    first, second = await requests(data)
    assert isinstance(first, BatchLine)
    assert isinstance(second, BatchLine)
    assert (first.custom_id, first.body, first.model, first.priority) == ("a", b'{"model":"m"}', "m", 3)
    assert first.needs == BodyNeeds((("m", "model"),), ((Scope.PRIORITY, "priority"),))
    assert (second.custom_id, second.body, second.model, second.priority) == ("b", b"{}", "", None)


@given(st.binary(max_size=64).map(lambda data: data.replace(b"x", b"\n")), st.integers(1, 40), st.integers(1, 9))
async def test_lines_are_the_same_in_blocks_of_any_size(data: bytes, max_bytes: int, block: int) -> None:
    with patch.multiple(lines_module, BLOCK_BYTES=block, READ_BYTES=3 * block):
        found = [raw async for raw in raw_lines(reader(data), max_bytes)]
    expected = [text for text in data.split(b"\n") if text.strip() or len(text) > max_bytes]
    assert [(raw.number, raw.size) for raw in found] == [(at, len(text)) for at, text in enumerate(expected)]
    assert [raw.text for raw in found] == [text if len(text) <= max_bytes else b"" for text in expected]
    assert await count_lines(data) == len(data.removesuffix(b"\n").split(b"\n")) * bool(data)


async def test_other_work_proceeds_while_lines_are_read_and_counted() -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    data = b"\n" * (4 << 20) + line("a")
    counting = asyncio.create_task(count_turns())
    try:
        assert len(await requests(data)) == 1
        assert turns > (4 << 20) // lines_module.BLOCK_BYTES
        turns = 0
        assert await count_lines(data) == (4 << 20) + 1
        assert turns > 3
        turns = 0
        await checked(b"1\n" * 5_000, max_broken=5_000)
        assert turns >= 5_000 // lines_module.LINES_A_TURN
    finally:
        counting.cancel()


async def test_check_ends_at_the_first_broken_line_too_many() -> None:
    found = await checked(b"1\n" * 1_000, max_broken=5)
    assert (found.total, len(found.broken), found.excess) == (6, 6, True)
    found = await checked(b"1\n" * 5 + line("a"), max_broken=5)
    assert (found.total, len(found.broken), found.excess) == (6, 5, False)


async def test_file_that_is_deleted_while_it_is_read_is_lost() -> None:
    async def read(start: int, size: int) -> bytes | None:
        return None if start else line("a") + b"\n" + b" " * (size - len(line("a")) - 1)

    with pytest.raises(FileLost):
        [raw async for raw in raw_lines(read, 1_000)]


async def test_line_passes_the_budgets_of_bodies() -> None:
    dense = line("a", body={"input": [[]] * 400})
    deep = line("b", body={"input": "DEEP"}).replace(b'"DEEP"', b"[" * 800 + b"]" * 800)
    found = await requests(dense + b"\n" + deep + b"\n" + line("c"), 10_000)
    assert [type(each) for each in found] == [LineError, LineError, BatchLine]


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
async def test_broken_line_is_an_error_of_its_own(text: bytes, code: str) -> None:
    found = await checked(b"\n".join([line("first"), text, line("last")]))
    assert (found.total, list(found.broken), found.excess) == (3, [1], False)
    broken = found.broken[1]
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
