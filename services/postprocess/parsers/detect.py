"""Detects the parsers that `auto` selects for a model from its chat template and special tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.common.packages.model_files import read_json
from services.postprocess.detokenize.vocabulary import ParserNames
from services.postprocess.parsers.engine_names import ENGINES
from services.postprocess.parsers.families import FAMILIES
from services.postprocess.parsers.families.family import EngineNames


def names_of(path: Path, is_special: frozenset[str]) -> ParserNames:
    """Returns the built-in parsers for the model at `path`; empty names if none is detected.

    Args:
        path: of the tokenizer, a folder or a file.
        is_special: texts of its special tokens.
    """
    template = template_of(path)
    tool = next((family.name for family in FAMILIES if family.writes_calls(template, is_special)), "")
    reasoning = next((family.name for family in FAMILIES if family.writes_thoughts(template, is_special)), "")
    return ParserNames(tool, reasoning)


def native_names(engine: str, found: ParserNames, template: str) -> ParserNames:
    """Returns the engine's parsers for a model whose built-in ones are `found`; empty names if it has none."""
    tools = [names for family in FAMILIES if family.name == found.tool for names in family.engine_tools]
    tool = _engine_name(engine, found.tool, tools, template, ENGINES[engine].tool)
    families = [family for family in FAMILIES if family.name == found.reasoning]
    plain = [names for family in families for names in family.engine_reasoning if not names.mark]
    reasoning = _engine_name(engine, found.reasoning, plain, template, ENGINES[engine].reasoning)
    if reasoning:
        marked = [names for family in FAMILIES for names in family.engine_reasoning if names.mark]
        reasoning = _engine_name(engine, reasoning, marked, template, ENGINES[engine].reasoning)
    return ParserNames(f"{engine}:{tool}" if tool else "", f"{engine}:{reasoning}" if reasoning else "")


def _engine_name(
    engine: str, name: str, choices: Sequence[EngineNames], template: str, available: frozenset[str]
) -> str:
    """Returns the engine's name of a parser by the first choice that applies; empty if the engine does not have it."""
    applying = next((names for names in choices if names.mark in template), None)
    if applying is not None:
        name = applying.of(engine) or name
    return name if name in available else ""


def writes_tools(template: str) -> bool:
    """Returns whether a chat template writes tools into prompts."""
    return re.search(r"\{[{%][^}%]*\btools\b", template) is not None


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
