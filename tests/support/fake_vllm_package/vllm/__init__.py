"""Stands in for vllm: prompts that show who made them, and a parser in capitals that misbehaves on demand.

FAKE_VLLM_VERSION selects which modules there are: 0.32 has no stream processor, 0.30 neither that nor composed parsers.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

__version__ = os.environ.get("FAKE_VLLM_VERSION", "0.33.0")


class _Request(SimpleNamespace):
    @classmethod
    def model_validate(cls, body: dict[str, Any]) -> _Request:
        return cls(
            tools=body.get("tools", []),
            messages=body.get("messages", []),
            skip_special_tokens=True,
            parallel_tool_calls=body.get("parallel_tool_calls", True),
        )


class _Parser:
    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._seen = ""
        self._hoard: list[bytearray] = []

    def adjust_request(self, request: _Request) -> _Request:
        return request

    def count_reasoning_tokens(self, ids: list[int]) -> int:
        return 0

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: _Request,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> Any:
        self._seen += delta_text
        if "RAISE" in self._seen:
            raise RuntimeError("as asked")
        while "LOOP" in self._seen:
            time.sleep(0.01)
        while "GROW" in self._seen:
            self._hoard.append(bytearray(1 << 20))
        if "DIE" in self._seen:
            os._exit(3)
        if not delta_text:
            return None
        calls = [_call(index) for index in range(2)] if "CALL" in delta_text else []
        return SimpleNamespace(reasoning="", content=delta_text.upper(), tool_calls=calls)


def _call(index: int) -> Any:
    return SimpleNamespace(index=index, id="", function=SimpleNamespace(name=f"f{index}", arguments="{}"))


class _Processor:
    def __init__(self, request: _Request, parser: _Parser, **named: Any) -> None:
        self.parser = parser
        self._request = request

    def step(self, text: str, ids: list[int], reason: str | None, prompt: list[int]) -> Any:
        delta = self.parser.parse_delta(text, ids, self._request, prompt, finished=reason is not None)
        if delta is not None and not self._request.parallel_tool_calls:
            delta.tool_calls = delta.tool_calls[:1]
        return SimpleNamespace(delta=delta)


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
if __version__ >= "0.33":
    _module(f"{_CHAT}.stream_processor", ChatStreamProcessor=_Processor)
_module(
    "vllm.config",
    ModelConfig=_prompts("model_config"),
    VllmConfig=_prompts("vllm_config"),
    DeviceConfig=lambda device: device,
)
_module("vllm.renderers", renderer_from_config=_prompts("renderer_from_config"))
_module("vllm.renderers.online_renderer", OnlineRenderer=_prompts("OnlineRenderer"))
_module("vllm.renderers.params", **({"TokenizeParams": SimpleNamespace} if __version__ >= "0.32" else {}))
if __version__ >= "0.32":
    _module("vllm.parser", ParserManager=_Manager)
_module("vllm.reasoning", ReasoningParserManager=_Manager)
_module("vllm.tool_parsers", ToolParserManager=_Manager)
_module("vllm.tokenizers", get_tokenizer=lambda *arguments, **named: object())
_module("vllm.tokenizers.hf", get_cached_tokenizer=lambda tokenizer: tokenizer)
