"""What the picker reads from headers and metadata, and what it writes into bodies."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.base.packing import pack_u32
from services.router.picker.bodies import with_token_ids
from services.router.picker.http_request import HttpRequest, endpoints_of, read_head


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("", ()),
        ("a:1", ("a:1",)),
        (" a:1 , b:2,", ("a:1", "b:2")),
        (["a:1,b:2", "c:3"], ("a:1", "b:2", "c:3")),
        ([], ()),
    ],
)
def test_endpoints_of_a_hint_are_read_from_strings_and_lists(value: object, expected: tuple[str, ...] | None) -> None:
    assert endpoints_of(value) == expected


@pytest.mark.parametrize(
    ("subset", "endpoint", "allowed"),
    [
        (None, "10.0.0.1:8000", True),
        ((), "10.0.0.1:8000", False),
        (("10.0.0.1:8000",), "10.0.0.1:8000", True),
        (("10.0.0.1",), "10.0.0.1:8000", True),
        (("10.0.0.1:8001",), "10.0.0.1:8000", False),
        (("fd00::1",), "[fd00::1]:8000", True),
    ],
)
def test_subset_allows_endpoints_by_address_or_host(
    subset: tuple[str, ...] | None, endpoint: str, allowed: bool
) -> None:
    assert HttpRequest(subset=subset).allows(endpoint) is allowed


def test_newer_header_names_win_over_older_ones() -> None:
    head = read_head({"x-gateway-inference-objective": "old", "x-llm-d-inference-objective": "new"})
    assert head.objective == "new"


@pytest.mark.parametrize(
    ("text", "expected"), [("250", 250), ("1.5e3", 1500), ("soon", 0), ("-1", 0), ("inf", 0), ("nan", 0)]
)
def test_objective_that_is_not_a_time_is_ignored(text: str, expected: int) -> None:
    assert read_head({"x-llm-d-slo-ttft-ms": text}).first_token_ms == expected


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.text(), st.sampled_from(["", " ", "\n"]))
def test_token_ids_in_a_body_leave_its_other_fields_as_they_are(ids: list[int], text: str, space: str) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})
    if '"nvext"' in body:
        return
    changed = json.loads(with_token_ids((body + space).encode(), pack_u32(ids)))
    assert changed.pop("nvext") == {"token_data": ids}
    assert changed == json.loads(body)


def test_body_with_fields_of_dynamo_is_not_changed() -> None:
    body = b'{"model": "m", "nvext": {"annotations": []}}'
    assert with_token_ids(body, pack_u32([1])) == body
