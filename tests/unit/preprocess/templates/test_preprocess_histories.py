"""Every odd but legal history renders with every template, and none of its text is lost.

`SLUICE_CHAT_TEMPLATES` names a folder of further templates (`*.jinja`), `SLUICE_TEST_EXAMPLES` the histories of each.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.base.errors import SluiceError
from services.preprocess.templates import templates
from services.preprocess.templates.capabilities import TemplateCapabilities
from services.preprocess.templates.learning import learn
from tests.support.data.chat_templates import TEMPLATES
from tests.support.odd_histories import TOOLS, histories

FOLDER = os.environ.get("SLUICE_CHAT_TEMPLATES", "")
EXAMPLES = int(os.environ.get("SLUICE_TEST_EXAMPLES", "12"))
VARIABLES: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "documents": None,
    "add_generation_prompt": True,
}
TURNS = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
THOUGHT = "thoughtqq"
CALL = {"id": "abcde0001", "type": "function", "function": {"name": "look", "arguments": {"q": "x"}}}
THINKING: list[dict[str, Any]] = [
    TURNS[0],
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [CALL],
        **dict.fromkeys(("reasoning_content", "reasoning", "thinking", "thought"), THOUGHT),
    },
    {"role": "tool", "content": "x", "tool_call_id": "abcde0001"},
]
ALL = {**TEMPLATES, **{path.stem: path.read_text() for path in sorted(Path(FOLDER).glob("*.jinja")) if FOLDER}}


def show(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str | None:
    try:
        return templates.probe(source, {**VARIABLES, "messages": messages, "tools": tools}, 2.0, 1 << 20)
    except SluiceError:
        return None


def shows(source: str) -> TemplateCapabilities:
    return learn(lambda messages, tools: show(source, messages, tools))


def renders(source: str, tools: str) -> bool:
    return show(source, [{"role": "user", "content": "x"}], TOOLS[tools]) is not None


@pytest.mark.parametrize("name", ALL)
def test_every_odd_history_is_rendered_without_loss(name: str) -> None:
    source = ALL[name]
    plain, with_tools = renders(source, "none"), renders(source, "full")
    if show(source, TURNS, None if plain else TOOLS["full"]) is None:
        pytest.skip("the template renders no plain chat")
    known = shows(source)
    thinks = THOUGHT in (show(source, THINKING, TOOLS["full"] if with_tools else None) or "")

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        history = data.draw(histories(tools=plain))
        tools = history.tools if with_tools else None
        variables = {**VARIABLES, "messages": history.messages, "tools": tools}
        prompt = templates.render(source, variables, 2.0, 1 << 20, known).text
        assert not history.lost(prompt, thoughts=thinks), prompt

    check()
