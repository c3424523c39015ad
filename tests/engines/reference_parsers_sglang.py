"""Run by the interpreter that has sglang: what its own server makes of tokens. See reference_parsers_vllm.

Arguments: this project's `services` folder, the model's folder. The handler's own methods do the work: SSE lines out.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import types
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    services = types.ModuleType("services")
    services.__path__ = [sys.argv[1]]
    sys.modules["services"] = services

from services.common.packages.engines import stand_in_for_absent

stand_in_for_absent("torchvision", "torchaudio", "sgl_kernel", "triton")

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest  # noqa: E402
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat  # noqa: E402
from sglang.srt.parser.reasoning_parser import ReasoningParser  # noqa: E402
from sglang.srt.parser.template_manager import TemplateManager  # noqa: E402
from sglang.srt.utils.hf_transformers_utils import get_tokenizer  # noqa: E402
from tokenizers.decoders import DecodeStream  # noqa: E402

ALWAYS = ("apertus2509", "kimi_k3", "inkling", "muse", "gpt-oss", "gemma4", "mistral")


class Parsers:
    """SGLang's parsers for one model.

    Args:
        folder: of the model.
    """

    def __init__(self, folder: str) -> None:
        self._tokenizer = get_tokenizer(folder)
        self._templates = TemplateManager()
        self._templates._run_template_detection(None, self._tokenizer)

    def _server(self, tool: str, reasoning: str) -> OpenAIServingChat:
        server = OpenAIServingChat.__new__(OpenAIServingChat)
        server.tokenizer_manager = SimpleNamespace(tokenizer=self._tokenizer)
        server.template_manager = self._templates
        server.tool_call_parser, server.reasoning_parser = tool or None, reasoning or None
        server._reasoning_detector = None
        if reasoning:
            server._reasoning_detector = ReasoningParser(reasoning, True, tokenizer=self._tokenizer).detector
        return server

    async def answer(self, case: dict[str, Any]) -> dict[str, Any]:
        """What the server sends for a case; its "finish" is the engine's reason, "stop" if unset."""
        server = self._server(case["tool"], case["reasoning"])
        body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
        if case.get("kwargs"):
            body["chat_template_kwargs"] = case["kwargs"]
        if case["tools"]:
            body |= {"tools": case["tools"], "tool_choice": "auto"}
        request = ChatCompletionRequest.model_validate(body)
        skip = not (case["tools"] or case["reasoning"] in ALWAYS)
        stream = DecodeStream(skip_special_tokens=skip)
        texts = [stream.step(self._tokenizer.backend_tokenizer, token) or "" for token in case["ids"]]
        said: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
        thinkers: dict[int, Any] = {}
        parsers: dict[int, Any] = {}
        called: dict[int, bool] = {}
        content = {"meta_info": {"id": "r"}}
        reason = case.get("finish", "stop")
        for place, delta in enumerate([*texts, ""]):
            finish = reason if place == len(texts) else None
            text = delta
            if server.reasoning_parser:
                reasoning, text = server._process_reasoning_stream(0, text, thinkers, content, request, finish)
                said["reasoning"] += reasoning or ""
            if server._tool_call_parsing_active(request) and not server._answer_started(thinkers.get(0)):
                async for chunk in server._process_tool_call_stream(
                    0, text, parsers, content, request, called, created=0, flush=finish is not None
                ):
                    take(said, chunk)
                if finish is not None and 0 in parsers:
                    take(said, server._check_for_unstreamed_tool_args(parsers[0], content, request, 0, created=0))
            else:
                said["content"] += text or ""
        said["finish"] = "tool_calls" if called.get(0) and reason == "stop" else reason
        return said


def take(said: dict[str, Any], chunk: str | None) -> None:
    if not chunk:
        return
    delta = json.loads(chunk.removeprefix("data: "))["choices"][0]["delta"]
    said["content"] += delta.get("content") or ""
    for call in delta.get("tool_calls") or ():
        entry = said["calls"].setdefault(str(call["index"]), ["", ""])
        entry[0] = entry[0] or call["function"].get("name") or ""
        entry[1] += call["function"].get("arguments") or ""


def main() -> None:
    """Answers until standard input ends."""
    parsers = Parsers(sys.argv[2])
    for line in sys.stdin:
        try:
            result = asyncio.run(parsers.answer(json.loads(line)))
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(result) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
