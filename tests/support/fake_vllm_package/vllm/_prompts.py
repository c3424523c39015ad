"""The part of the stand-in that makes prompts: a model's own tokenizer, and a template no model has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer

MARK = "<by the engine>"


class _Tokenizer:
    """As much of a Hugging Face tokenizer as is asked for."""

    chat_template = MARK

    def __init__(self, folder: str) -> None:
        self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self.max_token_id = self._tokenizer.get_vocab_size() - 1
        self.eos_token_id: int | None = None

    def __len__(self) -> int:
        return self.max_token_id + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


class OnlineRenderer:
    """Puts MARK before what the messages say."""

    def __init__(self, *, renderer: Any, **named: Any) -> None:
        self._tokenizer = renderer.get_tokenizer()

    async def render_chat(self, request: Any) -> Any:
        prompt = MARK + "".join(message["content"] for message in request.messages)
        return None, [{"prompt": prompt, "prompt_token_ids": self._tokenizer.encode(prompt)}]


def model_config(model: str, **named: Any) -> SimpleNamespace:
    return SimpleNamespace(model=model, max_model_len=4096)


def vllm_config(model_config: Any, **named: Any) -> SimpleNamespace:
    return SimpleNamespace(model_config=model_config)


def renderer_from_config(config: Any) -> SimpleNamespace:
    tokenizer = _Tokenizer(config.model_config.model)
    return SimpleNamespace(get_tokenizer=lambda: tokenizer)
