"""Run by the interpreter that has sglang: the prompts and answers of its own server, see `side`."""

from __future__ import annotations

import asyncio
import os
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import sglang
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.parser.template_manager import TemplateManager

from services.preprocess.engines.sglang import Manager
from services.preprocess.engines.stand_in import engine_folder
from tests.engines.reference_parsers_sglang import Parsers

LOOP = asyncio.new_event_loop()


class Model:
    """SGLang's handlers for one model, without its tokenizer manager's processes."""

    def __init__(self, path: Path) -> None:
        folder = engine_folder(path)
        manager = Manager(folder)
        templates = TemplateManager()
        templates.initialize_templates(manager, str(folder))
        self.tokenizer = manager.tokenizer
        self.chat = OpenAIServingChat(manager, templates)
        self.messages = AnthropicServing(self.chat)
        self.responses = OpenAIServingResponses(manager, templates)
        self.completions = OpenAIServingCompletion(manager, templates)

    async def prompt(self, api: str, body: dict[str, Any]) -> dict[str, Any]:
        if api == "completions":
            made, _ = self.completions._convert_to_internal_request(CompletionRequest.model_validate(body))
            return {"ids": self.tokenizer.encode(made.text), "schema": made.sampling_params.get("json_schema")}
        if api == "responses":
            request = ResponsesRequest.model_validate(body)
            _, (ids,), _, _ = await self.responses._make_request(request, None, self.tokenizer)
            constraint = request.to_sampling_params(64, {}).get("json_schema")
            return {"ids": self._ids(ids), "schema": constraint}
        chat = (
            self.messages._convert_to_chat_completion_request(AnthropicMessagesRequest.model_validate(body))
            if api == "messages"
            else ChatCompletionRequest.model_validate(body)
        )
        if problem := self.chat._validate_request(chat):
            return {"refused": problem}
        internal, _ = self.chat._convert_to_internal_request(chat)
        return {"ids": self._ids(internal.input_ids), "schema": internal.sampling_params.get("json_schema")}

    def _ids(self, made: Any) -> list[int]:
        return [int(token) for token in made]


model = cache(lambda path: Model(Path(path)))
parsers = cache(Parsers)


def prompt(case: dict[str, Any]) -> dict[str, Any]:
    return LOOP.run_until_complete(model(case["model"]).prompt(case["api"], case["body"]))


def answer(case: dict[str, Any]) -> dict[str, Any]:
    return LOOP.run_until_complete(parsers(case["model"]).answer(case))


VERSION = f"sglang {sglang.__version__}"
APIS = ("chat", "responses", "messages", "completions", "answers")
ANSWERERS = {"prompt": prompt, "answer": answer}
