"""SGLang's chat templates and tokenizer, as used by its API server; everything used of SGLang is imported here."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import sglang
from sglang.srt import runtime_context
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.openai.protocol import TokenizeRequest
from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from services.common.base.errors import invalid
from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.contract.validation import typed_placeholder
from services.preprocess.engines.sglang_images import ImageProcessor, UnsupportedImages
from services.preprocess.engines.stand_in import engine_folder, is_mistral
from services.preprocess.engines.tokenizer import EngineFacts, LibraryTokenizer, MediaPrompt

VERSION: str = sglang.__version__


class Manager:
    """The parts of SGLang's tokenizer manager that its request handlers use to build a prompt."""

    def __init__(self, folder: Path) -> None:
        self.server_args = ServerArgs(model_path=str(folder), device="cpu", trust_request_chat_template=True)
        runtime_context.publish(self.server_args, role="tokenizer")
        self.model_path = self.served_model_name = str(folder)
        self.model_config = ModelConfig(str(folder))
        self.tokenizer = get_tokenizer(str(folder))
        self.processor = None
        self.request_logger = SimpleNamespace(log_requests=False)

    def config_value(self, name: str) -> Any:
        """Returns the effective value of a server setting."""
        return runtime_context.get_context().config_leaf(name)


class Tokenizer(LibraryTokenizer):
    """SGLang's tokenizer for one model.

    Args:
        path: a model folder or a tokenizer file.
    """

    def __init__(self, path: Path) -> None:
        folder = engine_folder(path)
        self.manager = Manager(folder)
        self.templates = TemplateManager()
        self.templates.initialize_templates(self.manager, str(folder))
        self._serving = OpenAIServingTokenize(self.manager, self.templates)
        self._tokenizer = self.manager.tokenizer
        self._by_template = not is_mistral(folder)
        template = getattr(self._tokenizer, "chat_template", None)
        eos = self._tokenizer.eos_token_id
        self._images, no_images = self._image_processor() if folder == path else (None, "")
        self.facts = EngineFacts(
            version=VERSION,
            vocab_size=len(self._tokenizer),
            eos_ids=() if eos is None else (int(eos),),
            context_length=self.manager.model_config.context_len if folder == path or self._by_template else 0,
            chat_template=template if isinstance(template, str) else "",
            has_chat_template=bool(template) or not self._by_template,
            media=() if self._images is None else ("image",),
            no_images=no_images,
        )

    def _image_processor(self) -> tuple[ImageProcessor | None, str]:
        """Returns the processor of images, or why there is none."""
        if not self.manager.model_config.is_multimodal:
            return None, ""
        try:
            return ImageProcessor(self.manager.model_config, self.manager.server_args), ""
        except UnsupportedImages as error:
            return None, str(error)

    def encode_chat(self, chat: ChatRequest) -> list[int]:
        ids: list[int] = self._serving._tokenize_chat_request(self._request(chat))
        return [int(token) for token in ids]

    def encode_media(self, chat: ChatRequest) -> MediaPrompt:
        if self._images is None:
            return super().encode_media(chat)
        request = self._request(chat).to_chat_completion_request()
        handler = self._serving.chat_serving
        if problem := handler._validate_request(request):
            raise ValueError(problem)
        made = handler._process_messages(request, True)
        images = made.image_data or []
        unexpanded = self.encode_text(made.prompt)
        count = unexpanded.count(self._images.token_id)
        # SGLang ignores surplus images, and may never return with surplus placeholders.
        if count > len(images):
            raise typed_placeholder()
        if count < len(images):
            return MediaPrompt(unexpanded, unexpanded, [])
        ids, spans = self._images.expand(made.prompt, images)
        return MediaPrompt(ids, unexpanded, [("image", *span) for span in spans])

    def _request(self, chat: ChatRequest) -> TokenizeRequest:
        kwargs = dict(chat.template_kwargs)
        if chat.chat_template:
            kwargs["chat_template"] = chat.chat_template
        if chat.documents:
            kwargs["documents"] = chat.documents
        if (chat.chat_template or chat.documents) and not self._by_template:
            param = "chat_template" if chat.chat_template else "documents"
            raise invalid(f"This model's tokenizer does not support {param}; omit it.", param=param)
        body: dict[str, Any] = {"messages": chat.messages, "continue_final_message": chat.continue_final_message}
        if chat.tools:
            body["tools"] = chat.tools
            if chat.tool_choice is not None:
                body["tool_choice"] = chat.tool_choice
        if "reasoning_effort" in kwargs:
            body["reasoning_effort"] = kwargs.pop("reasoning_effort")
        if kwargs:
            body["chat_template_kwargs"] = kwargs
        if chat.add_generation_prompt is not None and not chat.continue_final_message:
            body["add_generation_prompt"] = chat.add_generation_prompt
        return TokenizeRequest.model_validate(body)

    def render(self, chat: ChatRequest) -> str:
        """Implements `TokenizerProtocol.render` by decoding the ids, which are authoritative."""
        return self.decode(self.encode_chat(chat))
