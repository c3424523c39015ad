"""Errors: their messages are short, whatever values of callers they name."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import MOST_MESSAGE, MOST_VALUE, ErrorKind, SluiceError, invalid, quoted, shortened


def test_shortened_text_within_the_limit_stays() -> None:
    assert shortened("x" * MOST_VALUE) == "x" * MOST_VALUE


def test_shortened_text_over_the_limit_ends_in_an_ellipsis() -> None:
    short = shortened("x" * (MOST_VALUE + 1))
    assert short == "x" * (MOST_VALUE - 1) + "…"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("a'b", '"a\'b"'), (5, "5"), (None, "None"), (["a"], "['a']"), ("line\nbreak", "'line\\nbreak'")],
)
def test_quoted_short_value_is_its_repr(value: Any, expected: str) -> None:
    assert quoted(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        "x" * 9_000_000,
        "\n" * 9_000_000,
        ["x" * 9_000_000] * 9,
        {"a": {"b": ["x" * 900] * 900}},
        [[[[[[[[[1]]]]]]]]] * 99,
    ],
)
def test_quoted_long_value_is_short(value: Any) -> None:
    assert len(quoted(value)) <= 2 * MOST_VALUE + 2


def test_error_with_a_long_message_param_and_code_is_short() -> None:
    error = SluiceError(ErrorKind.INVALID_ARGUMENT, "m" * 9_000, param="p" * 9_000, code="c" * 9_000)
    assert len(error.message) == len(str(error)) == MOST_MESSAGE
    assert (len(error.param), len(error.code)) == (MOST_VALUE, MOST_VALUE)
    assert invalid("m" * 9_000).message == "m" * (MOST_MESSAGE - 1) + "…"
