"""Usage is found in the responses of every API, however they are cut into chunks."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.picker.usage import UsageReader
from services.router.scheduling.decisions import Outcome

CHAT = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 64}}
RESPONSES = {"input_tokens": 100, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 64}}
EXPECTED = Outcome("r", 64, 7)
MESSAGES = (
    'event: message_start\ndata: {"message": {"usage": {"input_tokens": 36, "cache_read_input_tokens": 64}}}\n\n'
    'event: message_delta\ndata: {"usage":{"output_tokens":7}}\n\n'
)
TEXTS = {
    "chat": json.dumps({"choices": [{"message": {"content": '"prompt_tokens": 5'}}], "usage": CHAT}),
    "chat-stream": 'data: {"usage":null}\n\ndata: '
    + json.dumps({"choices": [], "usage": CHAT})
    + "\n\ndata: [DONE]\n\n",
    "responses": json.dumps({"output": [], "usage": RESPONSES}, indent=1),
    "messages-stream": MESSAGES,
}


def read(*chunks: bytes) -> Outcome | None:
    reader = UsageReader()
    for chunk in chunks:
        reader.feed(chunk)
    return reader.outcome("r")


@pytest.mark.parametrize("name", TEXTS)
def test_usage_of_an_api_is_found(name: str) -> None:
    assert read(TEXTS[name].encode()) == EXPECTED


@given(st.sampled_from(sorted(TEXTS)), st.lists(st.integers(0, 600), max_size=12))
def test_usage_cut_anywhere_is_the_same(name: str, cuts: list[int]) -> None:
    text = TEXTS[name].encode()
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    assert read(*(text[start:end] for start, end in pairwise(places))) == EXPECTED


def test_every_byte_alone_gives_the_same_usage() -> None:
    for text in TEXTS.values():
        assert read(*(bytes([byte]) for byte in text.encode())) == EXPECTED


@pytest.mark.parametrize(
    "text", [b"", b"no healthy upstream", b'{"choices": []}', b'{"prompt_tokens": "many"}', b"\xff"]
)
def test_response_without_usage_has_no_outcome(text: bytes) -> None:
    assert read(text) is None


def test_usage_without_cached_tokens_leaves_them_unknown() -> None:
    assert read(b'{"usage": {"prompt_tokens": 3, "completion_tokens": 2}}') == Outcome("r", None, 2)


def test_number_that_does_not_end_yet_is_not_read() -> None:
    assert read(b'{"completion_tokens": 12') is None
    assert read(b'{"completion_tokens": 12', b"34}") == Outcome("r", None, 1234)
