"""What a parsed JSON text takes: never more than the estimate, and for prompts not much less."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.net.intake.json_size import parsed_size

MANY = 20_000
PROSE = "Requests wait in line, at most ten seconds; then (503) they are refused. " * 500
CODE = 'def f(a, b):\n    return {"x": [a[0], b["y"]], "z": f(a, {})}\n' * 500


def compact(value: Any, ascii_only: bool = False) -> bytes:
    return json.dumps(value, ensure_ascii=ascii_only, separators=(",", ":")).encode()


def taken(text: bytes) -> int:
    """Bytes that the parser really takes for a text."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        parsed = orjson.loads(text)
        after = tracemalloc.get_traced_memory()[0]
        del parsed
    finally:
        tracemalloc.stop()
    return after - before


SHAPES = {
    "prose": compact({"messages": [{"role": "user", "content": PROSE}]}),
    "code": compact({"messages": [{"role": "user", "content": CODE}]}),
    "one wide character": compact({"a": "a" * MANY + "\N{GRINNING FACE}"}),
    "one wide character, escaped": compact({"a": "a" * MANY + "\N{GRINNING FACE}"}, ascii_only=True),
    "one Chinese character": compact({"a": "a" * MANY + "\u6f22"}),
    "one Chinese character, escaped": compact({"a": "a" * MANY + "\u6f22"}, ascii_only=True),
    "Latin": compact({"a": "\xe9" * MANY}),
    "lists": compact([[]] * MANY),
    "objects": compact([{}] * MANY),
    "spaced objects": b"[" + b"{ }," * MANY + b"1]",
    "integers": compact(list(range(MANY))),
    "floats": compact([1e5] * MANY),
    "strings": compact([str(number) for number in range(MANY)]),
    "quotes": compact([f"{number}\\" for number in range(MANY)]),
    "one large object": compact({str(number): number for number in range(MANY)}),
    "small objects": compact([{"a": 0}] * MANY),
    "small objects with keys of their own": compact([{str(number): 0} for number in range(MANY)]),
    "objects of six": compact([dict.fromkeys("abcdef", 0)] * MANY),
    "objects of eleven": compact([dict.fromkeys("abcdefghijk", 0)] * MANY),
    "nested lists": compact([[[[[0]]]]] * MANY),
    "nested objects": compact([{"a": {"a": {"a": {}}}}] * MANY),
    "messages": compact({"messages": [{"role": "user", "content": "hello"}] * MANY}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_parsed_size_of_a_shape_is_not_below_what_the_parser_takes(shape: str) -> None:
    assert parsed_size(SHAPES[shape]) >= taken(SHAPES[shape]) - 1024  # what the parser keeps for itself


@pytest.mark.parametrize("shape", ["prose", "messages", "integers"])
def test_parsed_size_of_a_prompt_is_a_few_times_what_the_parser_takes(shape: str) -> None:
    assert parsed_size(SHAPES[shape]) < 5 * taken(SHAPES[shape])


def test_parsed_size_of_code_is_close_to_what_the_parser_takes() -> None:
    text = SHAPES["code"]
    assert parsed_size(text) == pytest.approx(taken(text), rel=0.2)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=200,
)


@given(value=values, ascii_only=st.booleans())
def test_parsed_size_of_any_value_is_not_below_what_the_parser_takes(value: Any, ascii_only: bool) -> None:
    text = compact([value], ascii_only)
    assert parsed_size(text) >= taken(text) - 1024
