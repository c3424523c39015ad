"""Whatever escape sequences a model writes, every event of a parser can be sent, and arguments stay JSON."""

from __future__ import annotations

import json
import random

import pytest

from services.common.base.sendable_text import is_sendable, sendable, sendable_json
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.calls.parser import MALFORMED
from services.postprocess.parsers.engines.adapter import EngineParser
from services.postprocess.parsers.events import CallArguments, CallStart, Content, Degraded, Event, Reasoning
from services.postprocess.parsers.isolated.child import Streams
from services.postprocess.parsers.isolated.wire import Progress, pack_context, unpack_events
from services.postprocess.parsers.registry import build
from tests.support.data import parser_cases
from tests.support.data.call_formats import FORMATS
from tests.support.data.parser_cases import label
from tests.support.oracles.parsing import MARKUP, RECORDED, TOOLS, parsed, pieces_of

ESCAPES = [
    r"\ud801",
    r"\udc00",
    r"\uDfff\uD800",
    r"\\ud801",
    r"\\\ud801",
    r"\U0000d801",
    r"\U0000d83d\U0000de00",
    r"\ud83d\ude00",
    r"\ud83d\u0041",
    r"\x41\ud801",
    r'"\ud801"',
    r"'\ud801'",
    r"{\"t\":\"\ud801\"}",
    r'"{\"t\":\"\\ud801\"}"',
]
CASES = 150
HALF = chr(0xD801)


def check_sendable(events: list[Event]) -> None:
    for event in events:
        for field in event:
            assert not isinstance(field, str) or is_sendable(field), event


@pytest.mark.parametrize("names", MARKUP, ids=label)
def test_parser_events_of_escaped_half_pairs_can_be_encoded(names: tuple[str, str]) -> None:
    draw = random.Random(27)
    texts = [*RECORDED[names], *(parser_cases.case(names, draw)[0] for _ in range(CASES))]
    for text in texts:
        for _ in range(3):
            at, escape = draw.randrange(len(text) + 1), draw.choice(ESCAPES)
            written = text[:at] + escape + text[at:]
            parser = build(ParserNames(*names), ParserContext(TOOLS, identity="request-1"))
            for piece in pieces_of(written, [draw.randrange(10_000) for _ in range(3)]):
                check_sendable(parser.feed(piece))
            check_sendable(parser.finish())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("escape", "values"),
    [
        (r"\ud801", {"\ufffd", HALF, r"\ud801"}),
        (r"\U0000d801", {"\ufffd", HALF, r"\U0000d801"}),
        (r"\ud83d\ude00", {"😀", r"\ud83d\ude00"}),
        (r"\U0000d83d\U0000de00", {"😀", r"\U0000d83d\U0000de00"}),
    ],
)
def test_arguments_with_escapes_in_any_format_are_json(form: str, escape: str, values: set[str]) -> None:
    rendered = FORMATS[form].render([("f", {"city": "aXb", "more": ["aXb"]})])
    written = rendered.replace("aXb", f"a{escape}b")
    for pieces in ([written], list(written)):
        result = parsed(ParserNames(FORMATS[form].parser, ""), pieces)
        assert is_sendable(result.content)
        for name, arguments, _ in result.calls:
            assert name == "f"
            assert is_sendable(arguments)
            if result.degraded == {MALFORMED}:  # JSON has no escape sequence of this form
                assert escape.startswith(r"\U")
            else:
                assert json.loads(arguments)["city"] in {f"a{value}b" for value in values}


@pytest.mark.parametrize(
    "form", [form for form in FORMATS if '"city": "x"}}' in FORMATS[form].render([("f", {"city": "x"})])]
)
@pytest.mark.parametrize(("escape", "value"), [(r"\ud801", "\ufffd"), (r"\ud83d\ude00", "😀"), (r"\\ud801", "\ufffd")])
def test_arguments_written_as_a_text_are_json_that_can_be_encoded(form: str, escape: str, value: str) -> None:
    rendered = FORMATS[form].render([("f", {"city": "x"})])
    inner = json.dumps('{"city": "x"}').replace("x", escape)
    written = rendered.replace('{"city": "x"}', inner)
    ((name, arguments, _),) = parsed(ParserNames(FORMATS[form].parser, ""), [written]).calls
    assert name == "f"
    assert is_sendable(arguments)
    assert sendable(json.loads(arguments)["city"]) == value


class OwnParser(EngineParser):
    """A parser of other people, which returns any text."""

    def step(self, text: str, tokens: list[int], last: bool) -> list[Event]:
        return [
            Content("a\ud801"),
            Reasoning("\udc00b"),
            CallStart(0, "id\ud801", "f\ud801"),
            CallArguments(0, '{"a": "\ud83d\ude00"}'),
            Degraded("r\ud801"),
        ]


def test_own_parser_that_returns_half_pairs_sends_replacement_characters() -> None:
    streams = Streams(Progress(), lambda names, context: OwnParser(context))
    context = pack_context(ParserContext(TOOLS, identity="request-1"))
    operations = [["open", 1, ["x", ""], context, [], None], ["feed", 1, ["t"], None]]
    (result,) = streams.run(operations)
    assert unpack_events(result[2]) == [
        Content("a\ufffd"),
        Reasoning("\ufffdb"),
        CallStart(0, "id\ufffd", "f\ufffd"),
        CallArguments(0, '{"a": "😀"}'),
        Degraded("r\ufffd"),
    ]


@pytest.mark.parametrize("number", [-1, 1 << 16, 1 << 32])
def test_call_number_that_no_message_holds_is_refused(number: int) -> None:
    with pytest.raises(TypeError):
        unpack_events([["CallArguments", number, "x"]])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("é😀", "é😀"),
        ("a\ud801b", "a\ufffdb"),
        ("\ud83d\ude00", "😀"),
        ("\ud801\ud83d\ude00\udc00", "\ufffd😀\ufffd"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
    ],
)
def test_sendable_text_joins_pairs_and_replaces_halves(text: str, expected: str) -> None:
    assert sendable(text) == expected


def test_sendable_json_of_any_escapes_parses_to_what_sendable_gives() -> None:
    draw = random.Random(27)
    parts = [r"\ud801", r"\uD83D", r"\ude00", r"\\", r"\"", r"\n", "u", "d801", "é", r"\u0041"]
    for _ in range(2000):
        text = '"' + "".join(draw.choice(parts) for _ in range(draw.randrange(8))) + '"'
        assert json.loads(sendable_json(text)) == sendable(json.loads(text)), text
