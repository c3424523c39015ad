"""JSON of foreign senders: slices that equal the whole, bounds before anything is built, turns of the event loop."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.base import budgets
from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind
from services.common.net.intake import json_scan, json_slices
from services.common.net.intake.json_intake import MAX_DEPTH, JsonIntake
from services.common.net.intake.json_scan import Scan, depth_of
from services.common.net.intake.json_slices import SlicedParser, SliceError
from services.common.net.intake.json_values import Marks, without_strings
from services.common.net.intake.pace import LARGE_BYTES, BodyPace
from tests.support.oracles.errors import raises_error

NAMES = st.text('ab,:"\\[]{} é😀', max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | NAMES,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(NAMES, inner, max_size=6),
    max_leaves=40,
)
EDITS = st.lists(
    st.tuples(st.integers(0, 10_000), st.sampled_from(["", ",", "[", "]", "{", "}", '"', " ", ":", "\\", "1"])),
    max_size=3,
)


def _sliced(text: bytes, slice_bytes: int, slice_tokens: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_slices, "SLICE_BYTES", slice_bytes)
        patch.setattr(json_slices, "SLICE_TOKENS", slice_tokens)
        parser = SlicedParser(text)
        for _ in parser.slices():
            pass
    return parser.value


@given(VALUES, st.booleans(), EDITS, st.sampled_from([1, 2, 5, 17, 64]), st.integers(1, 5))
def test_slices_of_any_text_equal_the_parser_of_whole_texts(
    value: Any, indented: bool, edits: list[tuple[int, str]], slice_bytes: int, slice_tokens: int
) -> None:
    characters = list(json.dumps(value, indent=1 if indented else None, ensure_ascii=indented))
    for at, character in edits:
        characters[at % (len(characters) + 1) :][:1] = character
        characters.insert(at % (len(characters) + 1), character)
    text = "".join(characters).encode()
    try:
        whole = orjson.loads(text)
    except orjson.JSONDecodeError:
        with pytest.raises(SliceError):
            _sliced(text, slice_bytes, slice_tokens)
        return
    assert repr(_sliced(text, slice_bytes, slice_tokens)) == repr(whole)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 200 + b",".join([b"{}"] * 100_000) + b"]" * 200,
        b"[" + b",".join([b"1"] * 1_000_000) + b"]",
        b'{"a":[' + b",".join([b'"\\"",[]'] * 100_000) + b"]}",
    ],
    ids=["deep", "numbers", "strings"],
)
def test_slices_of_a_large_text_are_bounded(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = list[int]()
    loads = orjson.loads

    def recorded(piece: bytes) -> Any:
        pieces.append(len(piece))
        return loads(piece)

    monkeypatch.setattr(orjson, "loads", recorded)
    parser = SlicedParser(text)
    slices = sum(1 for _ in parser.slices())
    monkeypatch.undo()
    assert parser.value == loads(text)
    assert max(pieces) <= 3 * json_slices.SLICE_BYTES
    assert sum(pieces) <= len(text) + 100 * len(pieces)  # each byte once
    assert slices >= len(text) // (2 * json_slices.SLICE_BYTES)


SIZE = 64 * json_slices.SLICE_BYTES


@pytest.mark.parametrize(
    "text",
    [
        b'"' + rb"\n" * (SIZE // 2) + b'"',
        b'["' + rb"\\" * (SIZE // 2) + b'"]',
        b'{"a":"x' + b'\\"' * (SIZE // 2) + b'"}',
        b" " * SIZE + b"[]",
        b"[]" + b"\n" * SIZE,
        b"[" + b" " * SIZE + b"]",
    ],
    ids=["escapes", "backslashes", "quotes", "space before", "space after", "space within"],
)
def test_text_without_elements_is_scanned_in_slices_too(text: bytes) -> None:
    parser = SlicedParser(text)
    assert sum(1 for _ in parser.slices()) >= SIZE // json_slices.SLICE_BYTES - 2
    assert parser.value == orjson.loads(text)


@pytest.mark.parametrize("text", [b" " * SIZE + b"x[]", b'"a" []', b"1 {}", b"[]" + b" " * SIZE + b"x", b" " * SIZE])
def test_text_with_something_beside_its_value_is_no_json(text: bytes) -> None:
    with pytest.raises(SliceError):
        for _ in SlicedParser(text).slices():
            pass


@given(VALUES, st.booleans(), EDITS, st.sampled_from([1, 2, 3, 5, 17, 64]))
def test_scan_in_slices_counts_what_the_whole_text_has_outside_its_strings(
    value: Any, indented: bool, edits: list[tuple[int, str]], slice_bytes: int
) -> None:
    characters = list(json.dumps(value, indent=1 if indented else None, ensure_ascii=indented))
    for at, character in edits:
        characters.insert(at % (len(characters) + 1), character)
    text = "".join(characters).encode()
    outside, strings = without_strings(text, len(text))
    level = depth = 0
    for bracket in outside:
        level += {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}.get(bracket, 0)
        depth = max(depth, level)
    scans = Scan(text, None, None), Scan(text, None, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_scan, "SCAN_BYTES", slice_bytes)
        for scan in scans:
            for _ in scan.slices():
                pass
    exact, limited = scans
    expected = Marks.of(outside)
    assert exact.marks[:4] == expected[:4]
    assert exact.marks.strings == strings
    assert exact.depth == depth
    assert limited.too_deep == (depth > 2)


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'"",', b'"a":{},', b"0,"])
def test_scan_ends_at_the_first_value_too_many(unit: bytes) -> None:
    scan = Scan(b"[" + unit * 2_000_000, 100_000, 200)
    assert sum(1 for _ in scan.slices()) <= 2 + 100_000 * 3 // json_scan.SCAN_BYTES
    assert scan.too_many


@pytest.mark.parametrize("size", [MAX_DEPTH + 1, 1_000, LARGE_BYTES * 2])
@pytest.mark.parametrize(("opener", "closer"), [(b"[", b"]"), (b'{"a":', b"}")])
async def test_text_nested_too_deeply_is_refused_before_anything_is_built(
    size: int, opener: bytes, closer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = list[str]()
    monkeypatch.setattr(budgets, "on_refused", refused.append)
    text = opener * size + b"1" + closer * size
    tracemalloc.start()
    try:
        with raises_error(match="nested too deeply; the limit is 200 levels", kind=ErrorKind.INVALID_ARGUMENT):
            await JsonIntake().parse(text, 1)
        assert tracemalloc.get_traced_memory()[1] < 32 * len(text) + 100_000
    finally:
        tracemalloc.stop()
    assert refused == ["body_depth"]


async def test_text_with_many_shallow_objects_is_parsed() -> None:
    text = orjson.dumps([[{"a": ["[[[["]}] for _ in range(1_000)])
    assert depth_of(text) == 4
    assert await JsonIntake().parse(text, 1) == orjson.loads(text)


async def test_bounds_of_an_entrance_name_its_field_and_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = list[str]()
    monkeypatch.setattr(budgets, "on_refused", refused.append)
    intake = JsonIntake(
        Budget("body_values", 1_000, "--max-values"),
        max_bytes=Budget("body_bytes", 4_000, "--max-kb"),
        subject="The openai_body",
        param="prompt.openai_body",
    )
    with raises_error(match="--max-values", kind=ErrorKind.INVALID_ARGUMENT, param="prompt.openai_body"):
        await intake.parse(b"[" + b"[]," * 300 + b"[]]", 1)
    with raises_error(match="--max-kb", kind=ErrorKind.TOO_LARGE, param="prompt.openai_body"):
        intake.parse_now(b" " * 4_001)
    with raises_error(
        match="The openai_body is not valid JSON", kind=ErrorKind.INVALID_ARGUMENT, param="prompt.openai_body"
    ):
        intake.parse_now(b"{")
    assert refused == ["body_values", "body_bytes"]


async def test_large_text_is_parsed_with_other_work_between_its_slices() -> None:
    text = b"[" + b",".join([b"[]"] * 200_000) + b"]"
    turns, done, seen = 0, False, list[Marks]()

    async def others() -> None:
        nonlocal turns
        while not done:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    try:
        value = await JsonIntake(pace=BodyPace(1.0)).parse(text, 5, lambda text, marks: seen.append(marks))
    finally:
        done = True
        await running
    assert len(value) == 200_000
    assert seen == [Marks.of(text)._replace(exact=True)]
    assert turns >= 200_000 // json_slices.SLICE_TOKENS


async def test_body_beyond_those_that_may_wait_for_their_turn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = list[str]()
    monkeypatch.setattr(budgets, "on_refused", refused.append)
    pace, go_on = BodyPace(1.0, max_waiting=2), asyncio.Event()

    def slices() -> Iterator[None]:
        while not go_on.is_set():
            yield

    async def holder() -> None:
        await pace.turn(5, slices())

    tasks = [asyncio.create_task(holder())]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(pace.turn(5)) for _ in range(2)]
    await asyncio.sleep(0)
    with raises_error(match="2 others wait", kind=ErrorKind.UNAVAILABLE):
        await pace.turn(5)
    go_on.set()
    await asyncio.gather(*tasks)
    await pace.turn(5)
    assert refused == ["body_time"]


async def test_turn_is_released_when_a_slice_fails() -> None:
    pace = BodyPace(1.0)
    intake = JsonIntake(pace=pace)
    with raises_error(match="not valid JSON: .* after byte", kind=ErrorKind.INVALID_ARGUMENT):
        await intake.parse(b"[" + b"[]," * 200_000 + b"]", 1)
    assert await intake.parse(b" " * LARGE_BYTES * 2 + b"[]", 1) == []
