"""Runs SGLang's parsers as its API server does. All imports from SGLang are in this module."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import sglang
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.engines.adapter import PROBE, EngineParser, Facts, chat_body
from services.postprocess.parsers.events import Content, Event, Reasoning

KEEP_SPECIAL = ("apertus2509", "kimi_k3", "inkling", "muse", "gpt-oss", "gemma4", "mistral")
"""Reasoning parsers for which SGLang's server keeps special tokens in every response."""


@dataclass(frozen=True)
class _Model:
    tokenizer: Any
    templates: Any


class Engine:
    version: str = sglang.__version__

    def __init__(self) -> None:
        self.tool = sorted(FunctionCallParser.ToolCallParserEnum)
        self.reasoning = sorted(ReasoningParser.DetectorMap)
        self._models: dict[str, _Model] = {}

    def load(self, source: str, tool: str, reasoning: str) -> Facts:
        if source not in self._models:
            tokenizer = _tokenizer(Path(source))
            templates = TemplateManager()
            template = getattr(tokenizer, "chat_template", None)
            templates._run_template_detection(template if isinstance(template, str) else None, tokenizer)
            self._models[source] = _Model(tokenizer, templates)
        self.open(tool, reasoning, ParserContext([PROBE], source=source))
        return Facts(True, reasoning in KEEP_SPECIAL)

    def sources(self) -> Collection[str]:
        return self._models.keys()

    def forget(self, source: str) -> None:
        self._models.pop(source, None)

    def open(self, tool: str, reasoning: str, context: ParserContext) -> EngineParser:
        if context.source not in self._models:
            self.load(context.source, tool, reasoning)
        model = self._models[context.source]
        request = request_of(context)
        thoughts = self._reasoning(model, reasoning, request, bool(tool)) if reasoning else None
        return SglangParser(context, tool, thoughts, _calls(model, tool, request) if tool else None, request)

    def _reasoning(self, model: _Model, name: str, request: Any, tools: bool) -> Any:
        default = ReasoningParser(model_type=name, stream_reasoning=True, tokenizer=model.tokenizer).detector
        server = SimpleNamespace(reasoning_parser=name, template_manager=model.templates, _reasoning_detector=default)
        forced = model.templates.force_reasoning or OpenAIServingChat._get_reasoning_from_request(server, request)
        active = tools and bool(request.tools) and request.tool_choice != "none"
        return ReasoningParser(name, True, forced, request, tokenizer=model.tokenizer, tool_call_parser_active=active)


def _calls(model: _Model, name: str, request: Any) -> Any:
    """Returns the tool call parser that the server selects; None if it parses no calls."""
    tools = list(request.tools or ())
    if not tools:
        detector = FunctionCallParser.ToolCallParserEnum[name]
        return FunctionCallParser(tools, name, model.tokenizer) if detector.parses_without_tools() else None
    if request.tool_choice == "auto":
        return FunctionCallParser(tools, name, model.tokenizer)
    probe = FunctionCallParser(tools, name, model.tokenizer, request.tool_choice)
    return probe if probe.owns_tool_format() else JsonArrayParser()


class SglangParser(EngineParser):
    """Parser of one stream that uses SGLang."""

    def __init__(self, context: ParserContext, name: str, thoughts: Any, calls: Any, request: Any) -> None:
        super().__init__(context)
        self._name = name
        self._thoughts = thoughts
        self._calls = calls
        self._tools = list(request.tools or ())

    def step(self, text: str, tokens: list[int], last: bool) -> list[Event]:
        events: list[Event] = []
        if self._thoughts is not None:
            reasoning, text = self._think(text, last)
            if reasoning:
                events.append(Reasoning(reasoning))
            if tokens and getattr(self._thoughts.detector, "_in_reasoning", False):
                self.reasoning_tokens += len(tokens)
        if self._calls is None or OpenAIServingChat._answer_started(self._thoughts):
            return [*events, Content(text)] if text else events
        content, calls = self._parse(text, last)
        if content:
            events.append(Content(content))
        for call in calls:
            events += self._call(call)
        if last:
            events += self._remaining_arguments()
        return events

    def _think(self, text: str, last: bool) -> tuple[str, str]:
        reasoning, content = self._thoughts.parse_stream_chunk(text)
        if last:
            more, rest = self._thoughts.parse_stream_end()
            reasoning, content = (reasoning or "") + (more or ""), (content or "") + (rest or "")
        return reasoning or "", content or ""

    def _parse(self, text: str, last: bool) -> tuple[str, list[Any]]:
        if isinstance(self._calls, JsonArrayParser):
            found = self._calls.parse_streaming_increment(text, self._tools)
            end = self._calls.finish(self._tools) if last else None
            more = (end.normal_text, end.calls) if end is not None else ("", [])
            return (found.normal_text or "") + more[0], [*found.calls, *more[1]]
        content, calls = self._calls.parse_stream_chunk(text)
        if last:
            rest, others = self._calls.parse_stream_end()
            content, calls = (content or "") + (rest or ""), [*calls, *others]
        return content or "", list(calls)

    def _call(self, call: Any) -> list[Event]:
        if self.context.single and call.tool_index > 0:
            return []
        return self.call(call.tool_index, self._id(call), call.name, call.parameters)

    def _id(self, call: Any) -> str:
        """Returns the call id in the server's format; empty for the default."""
        if self._name == "kimi_k3":
            return f"{call.name}:{call.tool_index}"
        return f"functions.{call.name}:{call.tool_index}" if self._name == "kimi_k2" else ""

    def _remaining_arguments(self) -> list[Event]:
        """Returns arguments that the detector parsed but did not stream, which the server adds at the end."""
        detector = getattr(self._calls, "detector", self._calls)
        parsed = getattr(detector, "prev_tool_call_arr", None)
        streamed = getattr(detector, "streamed_args_for_tool", None)
        if not parsed or not streamed or len(parsed) > len(streamed):
            return []
        last = len(parsed) - 1
        arguments = parsed[last].get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if not text.startswith(streamed[last]) or (self.context.single and last > 0):
            return []
        return self.call(last, "", None, text[len(streamed[last]) :])


def request_of(context: ParserContext) -> Any:
    """Returns the request as SGLang's server sees it, with the fields that affect parsing."""
    body = chat_body(context)
    if context.template_kwargs:
        kwargs = dict(context.template_kwargs)
        if (effort := kwargs.pop("reasoning_effort", None)) is not None:
            body["reasoning_effort"] = effort
        body["chat_template_kwargs"] = kwargs
    return ChatCompletionRequest.model_validate(body)


def _tokenizer(path: Path) -> Any:
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and (folder / "tokenizer_config.json").is_file():
        return get_tokenizer(str(path))
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.name == "tokenizer.json" and file.is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_file=str(file))
    return get_tokenizer(str(path))
