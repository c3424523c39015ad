"""Runs vLLM's parsers as its API server does. All imports from vLLM are in this module."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
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
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers import get_tokenizer
from vllm.tool_parsers import ToolParserManager

from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.engines.adapter import PROBE, EngineParser, Facts, chat_body
from services.postprocess.parsers.events import Content, Event, Reasoning

STREAM_PROCESSOR = "vllm.entrypoints.openai.chat_completion.stream_processor"
"""What vLLM 0.33 has for streams and 0.32 does not."""

try:
    from vllm.entrypoints.openai.chat_completion.stream_processor import ChatStreamProcessor
except ModuleNotFoundError as error:
    if error.name != STREAM_PROCESSOR:
        raise
    ChatStreamProcessor = None

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
        if ChatStreamProcessor is None:
            return VllmParser(context, parser, _DeltaParser(parser, request).step)
        processor = ChatStreamProcessor(
            request, parser, enable_auto_tools=True, parser_cls=self._classes[context.source, tool, reasoning]
        )
        return VllmParser(context, parser, lambda *step: processor.step(*step).delta)


class _DeltaParser:
    """What the server of vLLM 0.32 does with each chunk of a choice, where 0.33 has `ChatStreamProcessor`."""

    def __init__(self, parser: Any, request: Any) -> None:
        self._parser = parser
        self._request = request
        self._any_output = False

    def step(self, text: str, tokens: list[int], finish_reason: str | None, prompt: list[int]) -> Any:
        """Returns the delta of a chunk; None for none."""
        if not text and not tokens and not self._any_output:
            return None
        self._any_output |= bool(tokens)
        delta = self._parser.parse_delta(
            delta_text=text,
            delta_token_ids=tokens,
            request=self._request,
            prompt_token_ids=prompt,
            finished=finish_reason is not None,
        )
        if delta is not None and not self._request.parallel_tool_calls:
            delta.tool_calls = [call for call in delta.tool_calls or () if call.index == 0]
        return delta


Step = Callable[[str, list[int], str | None, list[int]], Any]


class VllmParser(EngineParser):
    """Parser of one stream that uses vLLM.

    Args:
        parser: vLLM's, which counts the tokens of reasoning.
        step: passes text, tokens, the finish reason and the prompt to it; returns vLLM's delta.
    """

    def __init__(self, context: ParserContext, parser: Any, step: Step) -> None:
        super().__init__(context)
        self._parser = parser
        self._step = step
        self._prompt = list(context.prompt_ids)
        self._ids: list[int] = []

    def step(self, text: str, tokens: list[int], last: bool) -> list[Event]:
        self._ids += tokens
        delta = self._step(text, tokens, "stop" if last else None, self._prompt)
        if last:
            self.reasoning_tokens = self._parser.count_reasoning_tokens(self._ids)
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
