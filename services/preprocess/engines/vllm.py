"""vLLM's renderer and tokenizer, as used by its API server; everything used of vLLM is imported here."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm
from vllm.config import DeviceConfig, ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.renderers.params import TokenizeParams

from services.common.base.errors import invalid
from services.common.types.media.spans import MediaKind
from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.engines.stand_in import engine_folder, is_mistral
from services.preprocess.engines.tokenizer import EngineFacts, LibraryTokenizer, MediaPrompt

VERSION: str = vllm.__version__
KINDS = tuple(kind.capability for kind in MediaKind)
MAX_ITEMS = 256
"""Media items of each kind in a prompt for which vLLM's code is configured, above the limits of the service."""
CACHE_GIB = 0.05
"""Processed media items that vLLM keeps: the ids of repeated ones need no processing."""


class _Request(ChatCompletionRequest):  # type: ignore[misc]
    """A chat of any length; the gateway checks the context length."""

    def build_tok_params(self, model_config: Any) -> Any:
        return TokenizeParams(
            max_total_tokens=None, max_output_tokens=0, add_special_tokens=bool(self.add_special_tokens)
        )


class Tokenizer(LibraryTokenizer):
    """vLLM's tokenizer for one model.

    Args:
        path: a model folder or a tokenizer file.
    """

    def __init__(self, path: Path) -> None:
        folder = engine_folder(path)
        mode = "mistral" if is_mistral(folder) else "auto"
        model = ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            tokenizer_mode=mode,
            dtype="float32",
            enforce_eager=True,
            limit_mm_per_prompt=dict.fromkeys(KINDS, MAX_ITEMS),
            mm_processor_cache_gb=CACHE_GIB,
        )
        config = VllmConfig(model_config=model, device_config=DeviceConfig("cpu"))
        renderer = renderer_from_config(config)
        self._tokenizer = renderer.get_tokenizer()
        self._by_template = mode != "mistral"
        # As created by `vllm serve --enable-auto-tool-choice`; no other flag affects a prompt's ids.
        self._renderer = OnlineRenderer(
            model_config=model,
            renderer=renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
            trust_request_chat_template=True,
            enable_auto_tools=True,
        )
        self._loop = asyncio.new_event_loop()
        template = getattr(self._tokenizer, "chat_template", None) if self._by_template else None
        eos = self._tokenizer.eos_token_id
        self.facts = EngineFacts(
            version=VERSION,
            vocab_size=max(self._tokenizer.max_token_id + 1, len(self._tokenizer)),
            eos_ids=() if eos is None else (int(eos),),
            context_length=model.max_model_len if folder == path or self._by_template else 0,
            chat_template=template or "",
            has_chat_template=bool(template) or not self._by_template,
            media=_media_kinds(renderer) if self._by_template and folder == path and model.is_multimodal_model else (),
        )

    def _render_prompt(self, chat: ChatRequest) -> dict[str, Any]:
        if chat.documents and not self._by_template:
            raise invalid("This model's tokenizer does not support documents; omit them.", param="documents")
        body: dict[str, Any] = {"model": "m", "messages": chat.messages}
        if chat.tools:
            # With "none" vLLM keeps the tools in the prompt; other choices constrain the output, not the prompt.
            body |= {"tools": chat.tools, "tool_choice": "none" if chat.tool_choice == "none" else "auto"}
        if chat.continue_final_message:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        elif chat.add_generation_prompt is not None:
            body["add_generation_prompt"] = chat.add_generation_prompt
        if chat.chat_template:
            body["chat_template"] = chat.chat_template
        if chat.documents:
            body["documents"] = chat.documents
        kwargs = dict(chat.template_kwargs)
        if not self._by_template and "reasoning_effort" in kwargs:
            body["reasoning_effort"] = kwargs.pop("reasoning_effort")
        if kwargs:
            body["chat_template_kwargs"] = kwargs
        result = self._loop.run_until_complete(self._renderer.render_chat(_Request.model_validate(body)))
        if not isinstance(result, tuple):
            raise invalid(result.error.message, param=result.error.param or "messages")
        _, (prompt,) = result
        return dict(prompt)

    def encode_chat(self, chat: ChatRequest) -> list[int]:
        return [int(token) for token in self._render_prompt(chat)["prompt_token_ids"]]

    def encode_media(self, chat: ChatRequest) -> MediaPrompt:
        prompt = self._render_prompt(chat)
        found = (prompt.get("mm_placeholders") or {}).items()
        spans = [(kind, int(each.offset), int(each.length)) for kind, ranges in found for each in ranges]
        return MediaPrompt(
            [int(token) for token in prompt["prompt_token_ids"]],
            self.encode_text(prompt["prompt"], add_special_tokens=False),
            sorted(spans, key=lambda span: span[1]),
        )

    def render(self, chat: ChatRequest) -> str:
        prompt = self._render_prompt(chat)
        text = prompt.get("prompt")
        return text if isinstance(text, str) else self.decode(prompt["prompt_token_ids"])


def _media_kinds(renderer: Any) -> tuple[str, ...]:
    """Returns the kinds of media items that vLLM takes with the renderer's model."""
    limits = renderer.mm_processor.info.allowed_mm_limits
    return tuple(kind for kind in KINDS if limits.get(kind, 0) > 0)
