"""Runs vLLM's parsers as its API server does. All imports from vLLM are in this module."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.stream_processor import ChatStreamProcessor
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers import get_tokenizer
from vllm.tool_parsers import ToolParserManager

from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.engines.adapter import PROBE, EngineParser, Facts, chat_body
from services.postprocess.parsers.events import Content, Event, Reasoning

HARMONY = ("openai", "openai_gptoss")


@dataclass(frozen=True)
class _Model:
    tokenizer: Any
    config: Any


class Engine:
    version: str = vllm.__version__

    def __init__(self) -> None:
        self.tool: list[str] = ToolParserManager.list_registered()
        self.reasoning: list[str] = ReasoningParserManager.list_registered()
        self._models: dict[str, _Model] = {}
        self._classes: dict[tuple[str, str, str], Any] = {}

    def load(self, source: str, tool: str, reasoning: str) -> Facts:
        if source not in self._models:
            self._models[source] = _Model(_tokenizer(Path(source)), _config(Path(source)))
        model = self._models[source]
        try:
            self._classes[source, tool, reasoning] = ParserManager.get_parser(
                tool_parser_name=tool or None,
                reasoning_parser_name=reasoning or None,
                enable_auto_tools=True,
                is_harmony=bool({tool, reasoning} & set(HARMONY)),
                tokenizer=model.tokenizer,
            )
        except (TypeError, KeyError) as error:
            raise ValueError(str(error)) from error
        with_tools, without = (self._keeps_special(source, tool, reasoning, tools) for tools in ([PROBE], []))
        return Facts(with_tools, without)

    def sources(self) -> Collection[str]:
        return self._models.keys()

    def forget(self, source: str) -> None:
        self._models.pop(source, None)
        self._classes = {key: parser for key, parser in self._classes.items() if key[0] != source}

    def _keeps_special(self, source: str, tool: str, reasoning: str, tools: list[Any]) -> bool:
        request = request_of(ParserContext(tools))
        parser = self._parser(source, tool, reasoning, request, {})
        return not parser.adjust_request(request).skip_special_tokens

    def _parser(self, source: str, tool: str, reasoning: str, request: Any, kwargs: dict[str, Any]) -> Any:
        model = self._models[source]
        parser_class = self._classes[source, tool, reasoning]
        return parser_class(model.tokenizer, request.tools, chat_template_kwargs=kwargs, model_config=model.config)

    def open(self, tool: str, reasoning: str, context: ParserContext) -> EngineParser:
        if (context.source, tool, reasoning) not in self._classes:
            self.load(context.source, tool, reasoning)
        request = request_of(context)
        kwargs = dict(context.template_kwargs)
        parser = self._parser(context.source, tool, reasoning, request, kwargs)
        request = parser.adjust_request(request)
        processor = ChatStreamProcessor(
            request, parser, enable_auto_tools=True, parser_cls=self._classes[context.source, tool, reasoning]
        )
        return VllmParser(context, processor)


class VllmParser(EngineParser):
    """Parser of one stream that uses vLLM."""

    def __init__(self, context: ParserContext, processor: Any) -> None:
        super().__init__(context)
        self._processor = processor
        self._prompt = list(context.prompt_ids)
        self._ids: list[int] = []

    def step(self, text: str, tokens: list[int], last: bool) -> list[Event]:
        self._ids += tokens
        delta = self._processor.step(text, tokens, "stop" if last else None, self._prompt).delta
        if last:
            self.reasoning_tokens = self._processor.parser.count_reasoning_tokens(self._ids)
        if delta is None:
            return []
        events: list[Event] = []
        if delta.reasoning:
            events.append(Reasoning(delta.reasoning))
        if delta.content:
            events.append(Content(delta.content))
        for call in delta.tool_calls or ():
            function = call.function
            if function is not None:
                events += self.call(call.index, call.id or "", function.name, function.arguments)
        return events


def request_of(context: ParserContext) -> Any:
    """Returns the request as vLLM's server sees it, with the fields that affect parsing."""
    return ChatCompletionRequest.model_validate(chat_body(context))


def _tokenizer(path: Path) -> Any:
    if path.is_dir() and (path / "tokenizer_config.json").is_file():
        return get_tokenizer(str(path))
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        return get_tokenizer(str(path), tokenizer_mode="mistral")
    if path.name != "tokenizer.json" and not path.is_dir():
        with (
            TemporaryDirectory() as folder
        ):  # vLLM reads Mistral tokenizers only from folders, and Tekken only by this file name
            (Path(folder) / ("tekken.json" if path.suffix == ".json" else path.name)).symlink_to(path)
            return get_tokenizer(folder, tokenizer_mode="mistral")
    from transformers import PreTrainedTokenizerFast
    from vllm.tokenizers.hf import get_cached_tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    return get_cached_tokenizer(PreTrainedTokenizerFast(tokenizer_file=str(file)))


def _config(path: Path) -> Any:
    """Returns the fields of a model's configuration that parsers read: its type and architecture."""
    file = path / "config.json"
    if not file.is_file():
        return None
    found = json.loads(file.read_text("utf-8"))
    text = found.get("text_config") or {}
    return SimpleNamespace(
        hf_overrides=None,
        hf_config=SimpleNamespace(model_type=found.get("model_type")),
        hf_text_config=SimpleNamespace(model_type=text.get("model_type", found.get("model_type"))),
        architecture=next(iter(found.get("architectures") or ()), None),
    )
