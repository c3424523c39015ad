"""The parser in the documentation works as the documentation says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from services.postprocess.detokenize.stream import FinishReason, Limits, StreamOptions
from services.postprocess.parsers.base import Parser, ParserContext
from services.postprocess.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from services.postprocess.streams.factory import CustomParsers, StreamFactory
from tests.support.data.vocabularies import tekken
from tests.support.oracles.parsing import said

TEXT = (Path(__file__).parents[3] / "docs/parsers.md").read_text()
ANSWER = 'Look: [[get_weather {"city": "Zürich"}]] and [[g {}]] [[cut'


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The documented parser as a module that this process and its children can import."""
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "documented_parser.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "documented_parser", raising=False)
    return "documented_parser:BracketParser"


def test_the_example_says_the_same_for_any_split(example: str) -> None:
    module: Any = __import__("documented_parser")
    assert isinstance(module, ModuleType)
    whole = None
    for size in (len(ANSWER), 1, 2, 3, 7):
        parser: Parser = module.BracketParser(ParserContext(identity="r"))
        events = [event for at in range(0, len(ANSWER), size) for event in parser.feed(ANSWER[at : at + size])]
        heard = said(events + parser.finish())
        whole = whole or heard
        assert heard == whole
    assert whole is not None
    assert whole.content == "Look:  and  [[cut"
    assert [call[:2] for call in whole.calls] == [("get_weather", '{"city": "Zürich"}'), ("g", "{}")]


async def test_the_example_runs_where_own_parsers_run(example: str) -> None:
    opener = StreamFactory(Limits(), CustomParsers([example]))
    await opener.start()
    options = StreamOptions("m", tool_parser=example)
    tokens = tekken().encode(ANSWER)
    events, finish = await opener.parse(tokens, options, tekken().vocabulary, FinishReason.STOP, "r")
    await opener.close()
    assert [call[0] for call in said(events).calls] == ["get_weather", "g"]
    assert finish.reason is FinishReason.TOOL_CALLS


def test_every_built_in_parser_is_documented() -> None:
    rows = set(re.findall(r"`([\w-]+)`", "".join(line for line in TEXT.splitlines() if line.startswith("| `"))))
    assert {*TOOL_PARSERS, *REASONING_PARSERS} <= rows
