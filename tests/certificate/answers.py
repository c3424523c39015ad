"""What models answer: calls and thoughts in the format of every built-in parser, whole and cut."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.detect import native_names
from tests.certificate.conversations import ARGUMENTS, TEXTS
from tests.support.data.call_formats import FORMATS
from tests.support.oracles.parsing import RECORDED

FEATURES = ("plain", "tools", "parallel calls", "reasoning", "cut answer", "recorded")
_OWN_TEMPLATES = {"deepseek_v3": "```json"}
"""What `native_names` reads in the template of a format's model."""
_THOUGHTS = {
    "think": "<think>\n{}\n</think>\n\n",
    "qwen3": "<think>\n{}\n</think>\n\n",
    "deepseek_r1": "{}\n</think>\n\n",
    "deepseek_v3": "<think>{}</think>",
    "mistral": "[THINK]{}[/THINK]",
    "harmony": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
    "gemma4": "<|channel>thought\n{}\n<channel|>",
    "seed_oss": "<seed:think>{}</seed:think>",
    "cohere_command3": "<|START_THINKING|>{}<|END_THINKING|>",
    "minimax_m3": "<mm:think>{}</mm:think>",
    "granite_thinking": "Here is my thought process: {}\nHere is my response: ",
}
"""How models write thoughts before the rest of an answer."""
_ALWAYS = ("deepseek_r1",)
"""Whose template has begun the thoughts."""
_ALONE = ("llama3_json", "pythonic")
"""Formats of calls with nothing beside them."""


@dataclass(frozen=True)
class Written:
    """What an answer says."""

    content: str
    thoughts: str
    calls: tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True)
class Answer:
    """A model's output.

    Attributes:
        finish: "length" when it was cut.
        tools: the request had tools.
        thinks: the request's switch for thinking; None: not sent.
        written: what it was made of, content, thoughts and calls; None for recorded and cut ones.
    """

    number: int
    format: str
    feature: str
    text: str
    finish: str
    tools: bool
    thinks: bool | None = None
    written: Written | None = None


def pairs() -> dict[str, ParserNames]:
    """The built-in parsers of each format: that of calls, and the reasoning parser that its models need."""
    reasoning = {tool: thoughts for tool, thoughts in RECORDED if tool and thoughts}
    found = {name: ParserNames(form.parser, reasoning.get(form.parser, "")) for name, form in FORMATS.items()}
    return {**found, **{thoughts: ParserNames("", thoughts) for tool, thoughts in RECORDED if not tool}}


def names_for(engine: str, name: str, names: ParserNames) -> ParserNames:
    """The engine's parsers for a format; empty names for those it has not."""
    own = native_names(engine, names, _OWN_TEMPLATES.get(name, ""))
    return ParserNames(own.tool.removeprefix(f"{engine}:"), own.reasoning.removeprefix(f"{engine}:"))


def answer(name: str, names: ParserNames, feature: str, number: int, seed: int = 0) -> Answer | None:
    """The answer with this number; None for a feature that the format has not."""
    draw = random.Random(f"{seed}/{name}/{feature}/{number}")
    tools, finish = bool(names.tool), "stop"
    thinks: bool | None = None
    written: Written | None = None
    if feature == "recorded":
        text = draw.choice(RECORDED[names.tool, names.reasoning]) if (names.tool, names.reasoning) in RECORDED else ""
    elif (feature in ("tools", "parallel calls") and not tools) or (
        feature == "reasoning" and names.reasoning not in _THOUGHTS
    ):
        return None
    else:
        written = _written(names, feature, draw)
        thinks = bool(written.thoughts)
        text = _text(name, names, written)
    if feature == "cut answer":
        text, finish, written = text[: draw.randint(1, len(text))], "length", None
    return Answer(number, name, feature, text, finish, tools, thinks, written) if text else None


def _written(names: ParserNames, feature: str, draw: random.Random) -> Written:
    can_think = names.reasoning in _THOUGHTS and feature != "plain"
    thinks = feature == "reasoning" or names.reasoning in _ALWAYS or (can_think and draw.random() < 0.5)
    calls = 0
    if names.tool and feature not in ("plain", "reasoning"):
        calls = draw.randint(2, 3) if feature == "parallel calls" else 1
    beside = draw.random() < 0.5 and names.tool not in _ALONE
    content = draw.choice(TEXTS).strip() if beside or not calls else ""
    thoughts = draw.choice(TEXTS).strip() if thinks else ""
    made = [("get_weather", draw.choice(ARGUMENTS)) if place != 1 else ("now", {}) for place in range(calls)]
    return Written(content, thoughts, tuple(made))


def _text(name: str, names: ParserNames, written: Written) -> str:
    thoughts = _THOUGHTS[names.reasoning].format(written.thoughts) if written.thoughts else ""
    content = written.content
    if name == "harmony" and content:
        channel = "commentary" if written.calls else "final"
        content = f"<|channel|>{channel}<|message|>{content}" + ("<|end|><|start|>assistant" if written.calls else "")
    return thoughts + content + (FORMATS[name].render(written.calls) if written.calls else "")
