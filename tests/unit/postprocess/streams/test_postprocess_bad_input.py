"""Input that cannot be honoured: a typed error on that stream, and its neighbour notices nothing."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from typing import Any

import pytest

from services.common.base.errors import ErrorKind
from services.postprocess.detokenize.stream import Finish, FinishReason, StreamOptions
from services.postprocess.streams.session import SessionLimits
from tests.support.clients.post_client import session_of
from tests.support.data.vocabularies import tekken

OPTIONS = StreamOptions("m")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


async def outcome(options: StreamOptions, tokens: list[int]) -> Finish | None:
    """How slot 1 ends with these; slot 2 beside it must not care."""
    session = await session_of(tekken().vocabulary)
    session.open(2, "neighbour", OPTIONS, {})
    session.open(1, "r", options, {})
    words = tekken().encode("all is well")
    session.feed(array("I", [1, 2]), array("I", [len(tokens), len(words)]), array("I", [*tokens, *words]))
    session.end(2, FinishReason.STOP, None)
    batch = session.drain()
    assert batch is not None
    finishes = dict(batch.finishes)
    assert finishes[2].reason is FinishReason.STOP
    assert batch.text.endswith("all is well")
    await session.aclose()
    return finishes.get(1)


@pytest.mark.parametrize(
    ("options", "tokens", "kind", "param"),
    [
        ({}, [1 << 31], ErrorKind.INVALID_ARGUMENT, "token_ids"),
        ({}, [1100] * (1 << 18), ErrorKind.TOO_LARGE, "tokens.counts"),
        ({"stop": tuple(f"stop {number}" for number in range(1001))}, [], ErrorKind.INVALID_ARGUMENT, "stop"),
        ({"stop": ("x" * 9000,)}, [], ErrorKind.INVALID_ARGUMENT, "stop"),
        ({"tool_parser": "nonsense"}, [], ErrorKind.INVALID_ARGUMENT, "tool_parser"),
        ({"reasoning_parser": "vllm:qwen3"}, [], ErrorKind.INVALID_ARGUMENT, "reasoning_parser"),
        ({"tool_parser": "hermes", "tools_json": b"{}"}, [], ErrorKind.INVALID_ARGUMENT, "tools"),
        (
            {"tool_parser": "hermes", "tools_json": b'[{"type": "function"}]'},
            [],
            ErrorKind.INVALID_ARGUMENT,
            "tools[0]",
        ),
        (
            {
                "tool_parser": "hermes",
                "tools_json": json.dumps([TOOL, {"type": "web", "function": {"name": "f"}}]).encode(),
            },
            [],
            ErrorKind.INVALID_ARGUMENT,
            "tools[1]",
        ),
        (
            {"tool_parser": "hermes", "tools_json": b'[{"function": {"name": "f", "parameters": [1]}}]'},
            [],
            ErrorKind.INVALID_ARGUMENT,
            "tools[0]",
        ),
        ({"tool_parser": "hermes", "tools_json": b"[" * 100_000}, [], ErrorKind.INVALID_ARGUMENT, "tools"),
        ({"tool_parser": "hermes", "tools_json": b" " * (2 << 20)}, [], ErrorKind.INVALID_ARGUMENT, "tools"),
        ({"model": "unknown"}, [], ErrorKind.NOT_FOUND, "model"),
    ],
)
async def test_a_typed_error_on_that_stream_only(
    options: dict[str, Any], tokens: list[int], kind: ErrorKind, param: str
) -> None:
    finish = await outcome(replace(OPTIONS, **options), tokens)
    assert finish is not None
    assert finish.error is not None
    assert (finish.error.kind, finish.error.param) == (kind, param)


async def test_a_thousand_stop_strings_are_served() -> None:
    stops = tuple(f"stop{number}" for number in range(1_000))
    finish = await outcome(replace(OPTIONS, stop=stops), tekken().encode("now stop77 and more"))
    assert finish is not None
    assert finish.stop_string == "stop7", "the one that is complete first"


async def test_tools_whose_schemas_are_no_schemas_are_still_parsed() -> None:
    tools: list[Any] = [TOOL, {"type": "function", "function": {"name": "g", "parameters": {"properties": [1]}}}]
    text = "<function=g><parameter=a>1</parameter></function><function=unknown><parameter=b>x</parameter></function>"
    session = await session_of(tekken().vocabulary)
    session.open(1, "r", replace(OPTIONS, tool_parser="qwen3_coder", tools_json=json.dumps(tools).encode()), {})
    tokens = tekken().encode(text)
    session.feed(array("I", [1]), array("I", [len(tokens)]), array("I", tokens))
    session.end(1, FinishReason.STOP, None)
    batch = session.drain()
    assert batch is not None
    assert batch.finishes[0][1].reason is FinishReason.TOOL_CALLS
    await session.aclose()


async def test_a_stream_that_was_never_opened_is_answered_once() -> None:
    session = await session_of(tekken().vocabulary)
    session.open(2, "neighbour", OPTIONS, {})
    for _ in range(2):
        session.feed(array("I", [1, 2]), array("I", [1, 1]), array("I", [1100, 1100]))
    batch = session.drain()
    assert batch is not None
    ((slot, finish),) = batch.finishes
    assert (slot, finish.reason, finish.error and finish.error.code) == (1, FinishReason.ERROR, "stream_unknown")
    assert list(batch.slots) == [2]
    session.open(1, "r", OPTIONS, {})
    session.feed(array("I", [1]), array("I", [1]), array("I", [1100]))
    assert session.drain() is not None, "the slot can be used"
    await session.aclose()


async def test_tokens_that_were_under_way_when_their_stream_ended_are_ignored() -> None:
    session = await session_of(tekken().vocabulary, SessionLimits())
    session.open(1, "r", OPTIONS, {})
    session.close([1])
    session.feed(array("I", [1]), array("I", [2]), array("I", [1100, 1 << 31]))
    session.end(1, FinishReason.STOP, None)
    session.end(9, FinishReason.STOP, None)
    session.close([3])
    assert session.drain() is None
    await session.aclose()
