"""Ids of calls in messages: any id that a model writes becomes one that Anthropic's clients accept."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.apis.anthropic.call_ids import tool_use_id

IDS = st.one_of(st.from_regex(r"functions\.[a-z_.]{1,9}:[0-9]{1,3}", fullmatch=True), st.text(max_size=300))


@settings(max_examples=100, database=None)
@given(st.lists(IDS, unique=True, min_size=1, max_size=6), st.sampled_from(["msg_1", "msg_2"]))
def test_any_id_of_a_model_becomes_a_valid_one_of_its_own(ids: list[str], message_id: str) -> None:
    shown = [tool_use_id(call_id, message_id) for call_id in ids]
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,128}", call_id) for call_id in shown)
    assert len({*shown}) == len(ids)
    assert shown == [tool_use_id(call_id, message_id) for call_id in ids]


def test_id_that_is_valid_stays_and_others_differ_between_messages() -> None:
    assert tool_use_id("call_A1-b", "msg_1") == "call_A1-b"
    assert tool_use_id("functions.look:0", "msg_1") != tool_use_id("functions.look:0", "msg_2")
