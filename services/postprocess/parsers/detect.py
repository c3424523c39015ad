"""Detects the parsers that `auto` selects for a model from its chat template and special tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from services.common.models import read_json
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.engines import ENGINES
from services.postprocess.parsers.families import FAMILIES


def names_of(path: Path, is_special: frozenset[str]) -> ParserNames:
    """Returns the built-in parsers for the model at `path`; empty names if none is detected.

    Args:
        path: of the tokenizer, a folder or a file.
        is_special: texts of its special tokens.
    """
    template = template_of(path)
    return ParserNames(_tool(template, is_special), _reasoning(template, is_special))


_RENAMED: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "vllm": (
        {"harmony": "openai"},
        {"think": "qwen3", "harmony": "openai_gptoss"},
    ),
    "sglang": (
        {
            "llama3_json": "llama3",
            "deepseek_v3": "deepseekv3",
            "harmony": "gpt-oss",
            "minimax_m2": "minimax-m2",
        },
        {"think": "qwen3", "deepseek_r1": "deepseek-r1", "harmony": "gpt-oss"},
    ),
}
"""Tool and reasoning parsers that an engine names differently."""

# Families with a specific reasoning parser, by a marker in the template: the names in vLLM and SGLang.
_THINKERS = (
    ("<arg_key>", {"vllm": "glm45", "sglang": "glm45"}),
    ("<|tool_calls_section_begin|>", {"vllm": "kimi_k2", "sglang": "kimi_k2"}),
    ("<minimax:tool_call>", {"vllm": "minimax_m2", "sglang": "minimax"}),
)


_FORMS = (
    ("<minimax:tool_call>", "minimax_m2"),
    ("<|tool_call_argument_begin|>", "kimi_k2"),
    ("<parameter=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<|tool_call|>", "granite"),
)
"""Markers that are specific to the templates of one family, most specific first."""


def native_names(engine: str, found: ParserNames, template: str) -> ParserNames:
    """Returns the engine's parsers for a model whose built-in ones are `found`; empty names if it has none."""
    tools, reasonings = _RENAMED[engine]
    tool, reasoning = tools.get(found.tool, found.tool), reasonings.get(found.reasoning, found.reasoning)
    tool = tool if tool in ENGINES[engine].tool else ""
    reasoning = reasoning if reasoning in ENGINES[engine].reasoning else ""
    if found.tool == "deepseek_v3" and "```json" not in template:
        tool = "deepseek_v31" if engine == "vllm" else "deepseekv31"
    if found.tool == "pythonic" and "<|python_start|>" in template:
        tool = "llama4_pythonic" if engine == "vllm" else "pythonic"
    for mark, names in _THINKERS if reasoning else ():
        if mark in template:
            reasoning = names[engine]
    return ParserNames(f"{engine}:{tool}" if tool else "", f"{engine}:{reasoning}" if reasoning else "")


def writes_tools(template: str) -> bool:
    """Returns whether a chat template writes tools into prompts."""
    return re.search(r"\{[{%][^}%]*\btools\b", template) is not None


def _tool(template: str, special: frozenset[str]) -> str:
    if {"<|channel|>", "<|message|>"} <= special:
        return "harmony"
    for family in FAMILIES:
        if family.tool and (special.intersection(family.special) or any(mark in template for mark in family.hints)):
            return family.name
    if "<｜tool▁call▁begin｜>" in template or "<｜tool▁call▁begin｜>" in special:
        return "deepseek_v3"
    for mark, name in _FORMS:
        if mark in template:
            return name
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in special or "[TOOL_CALLS]" in template:
        return "mistral"
    if "func_name1(" in template or "<|python_start|>" in special:
        return "pythonic"
    if "<|python_tag|>" in special and '"parameters"' in template:
        return "llama3_json"
    return ""


def _reasoning(template: str, special: frozenset[str]) -> str:
    if {"<|channel|>", "<|message|>"} <= special:
        return "harmony"
    if "[THINK]" in special or "[THINK]" in template:
        return "mistral"
    for family in FAMILIES:
        if family.reasoning and any(mark in template for mark in family.reasoning_hints):
            return family.name
    if "<think>" not in template and "</think>" not in template and "<think>" not in special:
        return ""
    # The first template of R1 lacks the tag, but the model reasons nevertheless.
    return "deepseek_r1" if "<｜Assistant｜>" in template and "<think>" not in template else "think"


def template_of(path: Path) -> str:
    """Returns the chat template of the model at `path`; empty for none."""
    folder = path if path.is_dir() else path.parent
    file = folder / "chat_template.jinja"
    if path.is_dir() and file.is_file():
        return file.read_text("utf-8", errors="replace")
    return _text(read_json(path, "tokenizer_config.json").get("chat_template"))


def _text(template: Any) -> str:
    """Returns the text of a template; several named ones such as `default` and `tool_use` are joined."""
    if isinstance(template, str):
        return template
    if isinstance(template, list):
        return "\n".join(_text(part.get("template")) for part in template if isinstance(part, dict))
    return ""
