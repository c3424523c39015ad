"""JSON that clients send within strings, where the values of a body are not counted."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from services.common.base import budgets
from services.common.base.errors import ErrorKind
from services.common.rpc.generation import read_sampling
from services.postprocess.streams import parser_selection
from services.preprocess.contract.tokenizer import Message
from services.preprocess.contract.validation import parse_chat
from services.preprocess.templates.capabilities import TemplateCapabilities
from services.preprocess.templates.histories import fit
from services.worker.local_processing.body import read_body
from sluice.v1 import common_pb2
from tests.support.oracles.errors import raises_error

MIB = 1 << 20
TEXT = b'{"a":[' + b"[]," * (4 * MIB // 3) + b"0]}"
DEEP = b'{"a":' * 1_000 + b"1" + b"}" * 1_000

READERS: dict[str, Callable[[bytes], object]] = {
    "messages": parse_chat,
    "tools": lambda text: parse_chat(b'[{"role":"user","content":"x"}]', text),
    "template arguments": lambda text: parse_chat(b'[{"role":"user","content":"x"}]', template_kwargs_json=text),
    "arguments of a parser": parser_selection._kwargs,
    "engine options": lambda text: read_sampling(common_pb2.SamplingOptions(engine_options_json=text)),
    "body for an engine": read_body,
}


@pytest.mark.parametrize("text", [TEXT, DEEP], ids=["values", "depth"])
@pytest.mark.parametrize("reader", READERS.values(), ids=list(READERS))
def test_json_in_a_field_of_a_message_is_refused_before_anything_is_built(
    reader: Callable[[bytes], object], text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = list[str]()
    monkeypatch.setattr(budgets, "on_refused", refused.append)
    tracemalloc.start()
    try:
        with raises_error(kind=ErrorKind.INVALID_ARGUMENT, code=budgets.CODE):
            reader(text)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(text) + 200_000
    finally:
        tracemalloc.stop()
    assert len(refused) == 1


SHOWS = TemplateCapabilities(loose_arguments=True)


def _history(arguments: list[str]) -> list[Message]:
    calls = [
        {"id": f"c{index}", "type": "function", "function": {"name": "f", "arguments": each}}
        for index, each in enumerate(arguments)
    ]
    return [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls]


def test_arguments_of_all_tool_calls_of_a_history_together_are_refused_before_they_are_built() -> None:
    part = '{"a":[' + "[]," * 30_000 + "0]}"
    (few,) = fit(_history([part]), None, SHOWS).turns
    assert len(few.message["tool_calls"][0]["function"]["arguments"]["a"]) == 30_001
    tracemalloc.start()
    try:
        with raises_error(match="The arguments of tool calls", param="messages", code=budgets.CODE):
            fit(_history([part] * 20), None, SHOWS)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_arguments_that_are_no_json_or_too_deep_stay_a_text() -> None:
    for text in ("{", DEEP.decode()):
        (turn,) = fit(_history([text]), None, SHOWS).turns
        assert turn.message["tool_calls"][0]["function"]["arguments"] == text
