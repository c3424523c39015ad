"""Request schemas of /tokenize and /detokenize, compatible with vLLM."""

from __future__ import annotations

from pydantic import Field, model_validator

from services.gateway.apis.openai.fields import JsonObject, Strict, TokenId
from services.gateway.apis.openai.schemas import Messages, Tools


class TokenizeRequest(Strict):
    """POST /tokenize: a `prompt`, or the `messages` of a chat with its template options."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject = None
    tools: Tools | None = None

    @model_validator(mode="after")
    def _prompt_or_messages(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages must be set, but not both")
        for name in (
            "add_generation_prompt",
            "continue_final_message",
            "chat_template",
            "chat_template_kwargs",
            "tools",
        ):
            if self.prompt is not None and getattr(self, name) is not None:
                raise ValueError(f"{name} requires messages instead of prompt")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens cannot be true with messages: the chat template adds special tokens")
        return self


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId] = Field(fail_fast=True)
