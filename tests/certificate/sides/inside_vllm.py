"""Run by the interpreter that has vllm: the prompts and answers of its own server, see `side`."""

from __future__ import annotations

import asyncio
import os
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm
from vllm.config import DeviceConfig, ModelConfig, VllmConfig
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages, DisabledThinkingEffortResolver
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer

from services.preprocess.engines.stand_in import engine_folder, is_mistral
from tests.engines.reference_parsers_vllm import Parsers

LOOP = asyncio.new_event_loop()
MAX_TOKENS = 64


class Model:
    """What `vllm launch render` has for one model: the same classes, without HTTP."""

    def __init__(self, path: Path) -> None:
        folder = engine_folder(path)
        model = ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            tokenizer_mode="mistral" if is_mistral(folder) else "auto",
            dtype="float32",
            enforce_eager=True,
        )
        renderer = renderer_from_config(VllmConfig(model_config=model, device_config=DeviceConfig("cpu")))
        self.renderer = OnlineRenderer(
            model_config=model,
            renderer=renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
            enable_auto_tools=True,
        )
        self.merges = AnthropicServingMessages._should_merge_inline_system(self.renderer)
        self.effort = DisabledThinkingEffortResolver(self.renderer)

    async def prompt(self, api: str, body: dict[str, Any]) -> dict[str, Any]:
        if api == "completions":
            text = CompletionRequest.model_validate(body)
            return self._result(await self.renderer.render_completion(text), text)
        if api == "responses":
            response = ResponsesRequest.model_validate(body)
            made = await self.renderer.render_responses(response)
            return self._result(made if isinstance(made, ErrorResponse) else [made.engine_input], response)
        if api == "messages":
            message = AnthropicMessagesRequest.model_validate(body)
            chat = AnthropicServingMessages.to_chat_completion_request(
                message,
                merge_inline_system=self.merges,
                disabled_thinking_effort=await self.effort.resolve_for(message),
            )
        else:
            chat = ChatCompletionRequest.model_validate(body)
        rendered = await self.renderer.render_chat(chat)
        return self._result(rendered if isinstance(rendered, ErrorResponse) else rendered[1], chat)

    def _result(self, made: Any, request: Any) -> dict[str, Any]:
        if isinstance(made, ErrorResponse):
            return {"refused": made.error.message}
        (prompt,) = made
        constraint = request.to_sampling_params(MAX_TOKENS, {}).structured_outputs
        schema = constraint.json if constraint is not None else None
        return {"ids": [int(token) for token in prompt["prompt_token_ids"]], "schema": schema}


model = cache(lambda path: Model(Path(path)))
parsers = cache(Parsers)


def prompt(case: dict[str, Any]) -> dict[str, Any]:
    return LOOP.run_until_complete(model(case["model"]).prompt(case["api"], case["body"]))


def answer(case: dict[str, Any]) -> dict[str, Any]:
    return parsers(case["model"]).answer(case)


VERSION = f"vllm {vllm.__version__}"
APIS = ("chat", "responses", "messages", "completions", "answers")
ANSWERERS = {"prompt": prompt, "answer": answer}
