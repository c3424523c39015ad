"""Stands in for vllm: prompts that show who made them, and a parser in capitals that misbehaves on demand."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

__version__ = "0.33.0"


class _Request(SimpleNamespace):
    @classmethod
    def model_validate(cls, body: dict[str, Any]) -> _Request:
        return cls(tools=body.get("tools", []), messages=body.get("messages", []), skip_special_tokens=True)


class _Parser:
    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def adjust_request(self, request: _Request) -> _Request:
        return request

    def count_reasoning_tokens(self, ids: list[int]) -> int:
        return 0


class _Processor:
    def __init__(self, request: _Request, parser: _Parser, **named: Any) -> None:
        self.parser = parser
        self._seen = ""
        self._hoard: list[bytearray] = []

    def step(self, text: str, ids: list[int], reason: str | None, prompt: list[int]) -> Any:
        self._seen += text
        if "RAISE" in self._seen:
            raise RuntimeError("as asked")
        while "LOOP" in self._seen:
            time.sleep(0.01)
        while "GROW" in self._seen:
            self._hoard.append(bytearray(1 << 20))
        if "DIE" in self._seen:
            os._exit(3)
        delta = SimpleNamespace(reasoning="", content=text.upper(), tool_calls=[])
        return SimpleNamespace(delta=delta if text else None)


class _Manager:
    @staticmethod
    def list_registered() -> list[str]:
        return ["hermes"]

    @staticmethod
    def get_parser(**named: Any) -> type[_Parser]:
        return _Parser


def _module(name: str, **contents: Any) -> None:
    made = ModuleType(name)
    made.__path__ = []
    for key, value in contents.items():
        setattr(made, key, value)
    sys.modules[name] = made


def _prompts(name: str) -> Callable[..., Any]:
    """A name of `_prompts`, which needs a package that parsers do not."""

    def made(*arguments: Any, **named: Any) -> Any:
        return getattr(importlib.import_module("vllm._prompts"), name)(*arguments, **named)

    return made


_CHAT = "vllm.entrypoints.openai.chat_completion"
_module("vllm.entrypoints")
_module("vllm.entrypoints.openai")
_module(_CHAT)
_module(f"{_CHAT}.protocol", ChatCompletionRequest=_Request)
_module(f"{_CHAT}.stream_processor", ChatStreamProcessor=_Processor)
_module(
    "vllm.config",
    ModelConfig=_prompts("model_config"),
    VllmConfig=_prompts("vllm_config"),
    DeviceConfig=lambda device: device,
)
_module("vllm.renderers", renderer_from_config=_prompts("renderer_from_config"))
_module("vllm.renderers.online_renderer", OnlineRenderer=_prompts("OnlineRenderer"))
_module("vllm.renderers.params", TokenizeParams=SimpleNamespace)
_module("vllm.parser", ParserManager=_Manager)
_module("vllm.reasoning", ReasoningParserManager=_Manager)
_module("vllm.tool_parsers", ToolParserManager=_Manager)
_module("vllm.tokenizers", get_tokenizer=lambda *arguments, **named: object())
_module("vllm.tokenizers.hf", get_cached_tokenizer=lambda tokenizer: tokenizer)
