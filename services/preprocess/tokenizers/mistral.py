"""Mistral's tokenizers: mistral-common defines the conversation format; there is no Jinja template.

As permissive as an engine that serves these models, and more where a conversation is legal: one that ends with an
assistant message continues it, a system message after the model's turn, as agents send them, becomes a user message,
and conversations are fitted to what mistral-common shows (ids of calls, empty turns, arguments), learned by probes as
for templates. Text and calls in one turn are the tokens that the model generated. Anything that mistral-common rejects
beyond that is reported with its own message.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from mistral_common.exceptions import InvalidToolException, InvalidToolSchemaException, MistralCommonException
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy, TokenizerVersion
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as Tokenizer
from pydantic import ValidationError

from services.common.base.errors import first_line, invalid, quoted
from services.common.base.packing import pack_u32, unpack_u32
from services.common.packages.model_files import fingerprint, read_json
from services.common.types.media.spans import MediaKind
from services.preprocess.contract.generation_defaults import generation_defaults
from services.preprocess.contract.tokenizer import (
    EFFORT,
    HINTS,
    CacheStats,
    ChatRequest,
    ChatTokenizer,
    Message,
    TokenizerFacts,
    Tool,
)
from services.preprocess.encoders.backend import CACHE_OFF, EncoderOptions
from services.preprocess.encoders.mistral import MistralEncoder
from services.preprocess.encoders.mistral_plain import PlainEncoder
from services.preprocess.templates.capabilities import REASONING_FIELDS, STANDARD_FIELDS
from services.preprocess.templates.histories import fit
from services.preprocess.templates.learning import learn
from services.preprocess.tokenizers.mistral_images import IMAGE_PART, MistralImages

_UNSET_LENGTH = 10**9
_PATTERNS = ("tekken.json", "tokenizer.model.v*", "tokenizer.model")

logging.getLogger("mistral_common").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", category=Warning, module=r"mistral_common\..*")


class MistralTokenizer(ChatTokenizer):
    """A tekken.json or SentencePiece model of Mistral.

    Args:
        path: the file, or a model folder that contains one.
        encoder_options: which optimizations to use.
    """

    def __init__(self, path: Path, encoder_options: EncoderOptions | None = None) -> None:
        self._tokenizer: Tokenizer[Any, Any, Any, Any, Any] = Tokenizer.from_file(_tokenizer_file(path))
        self._text = self._tokenizer.instruct_tokenizer.tokenizer
        self._supports_reasoning = self._text.version >= TokenizerVersion.v13
        _allow_text_with_calls(self._tokenizer)
        self._encoder = MistralEncoder(self._text, encoder_options or EncoderOptions())
        self._plain = PlainEncoder.for_tokenizer(self._tokenizer, self._encoder.pack)
        # Only after the fast path was compared with mistral-common, which must not use this encoder then.
        self._encoder.stand_in(self._text)
        _leave_text_out(self._tokenizer)
        images = MistralImages.take_over(self._tokenizer.instruct_tokenizer)
        self.media_rules = {MediaKind.IMAGE: images} if images is not None else {}
        # mistral-common gives each legal system message its place.
        self._shows = replace(learn(self._probe), late_system=True)
        config = read_json(path, "params.json") | read_json(path, "config.json")
        length = config.get("max_position_embeddings") or config.get("max_seq_len") or 0
        self.facts = TokenizerFacts(
            processor="mistral",
            fingerprint=fingerprint(path),
            vocab_size=self._text.n_words,
            eos_ids=(self._text.eos_id,),
            context_length=length if isinstance(length, int) and 0 < length < _UNSET_LENGTH else 0,
            has_chat_template=True,
            backend=self._encoder.backend,
            cache_refusal="" if self._encoder.cache_stats is not None else CACHE_OFF,
            defaults=generation_defaults(read_json(path, "generation_config.json")),
            without_effect=HINTS - {EFFORT} if self._text.version.supports_model_settings else HINTS,
            template=self._shows.as_json(),
        )

    @property
    def cache_stats(self) -> CacheStats | None:
        return self._encoder.cache_stats

    def pack_chat(self, chat: ChatRequest) -> bytes:
        chat = self._without_hints(chat)
        if self._plain is not None and not (self.media_rules and _shows_images(chat)):
            try:
                ids = self._plain.pack(chat)
            except ValueError as error:
                _refuse_text(error, "messages")
            if ids is not None:
                return ids
        return pack_u32(self._encode(chat))

    def encode_chat(self, chat: ChatRequest) -> list[int]:
        return unpack_u32(self.pack_chat(chat)).tolist()

    def render(self, chat: ChatRequest) -> str:
        """Returns the prompt as text by decoding the ids, which are authoritative."""
        return self.decode(self._encode(self._without_hints(chat)))

    def pack_text(self, text: str, add_special_tokens: bool | None = None) -> bytes:
        """Returns packed ids of a text, with BOS by default; text never becomes a control token."""
        try:
            (ids,) = self._encoder.pack([text])
        except (TypeError, ValueError) as error:
            _refuse_text(error, "prompt")
        return ids if add_special_tokens is False else pack_u32([self._text.bos_id]) + ids

    def encode_text(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        return unpack_u32(self.pack_text(text, add_special_tokens)).tolist()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        policy = SpecialTokenPolicy.IGNORE if skip_special_tokens else SpecialTokenPolicy.KEEP
        return self._text.decode(list(token_ids), special_token_policy=policy)

    def _without_hints(self, chat: ChatRequest) -> ChatRequest:
        """Returns the chat without the arguments that change no prompt of this model."""
        dead = self.facts.without_effect
        if dead.isdisjoint(chat.template_kwargs):
            return chat
        kept = {name: value for name, value in chat.template_kwargs.items() if name not in dead}
        return replace(chat, template_kwargs=kept)

    def _encode(self, chat: ChatRequest) -> list[int]:
        """Returns the ids as encoded by mistral-common."""
        extra = _extra_arguments(chat)
        _check_results(chat.messages)
        turns, tools, notes = fit(chat.messages, chat.prompt_tools, self._shows)
        chat.notes.extend(notes)
        messages = _in_order([self._adapted(turn.message) for turn in turns])
        continued = messages[-1]["role"] == "assistant"
        if chat.continue_final_message and not continued:
            raise invalid(
                "Only an assistant message can be continued; unset continue_final_message.",
                param="continue_final_message",
            )
        try:
            request = ChatCompletionRequest.from_openai(
                messages=messages, tools=tools, continue_final_message=continued, **extra
            )
            ids: list[int] = self._tokenizer.encode_chat_completion(request).tokens
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            param = f"chat_template_kwargs.{where}" if where in extra else "messages"
            raise invalid(f"The model rejects this chat: {where}: {first['msg']}.", param=param) from error
        except (InvalidToolException, InvalidToolSchemaException) as error:
            raise invalid(f"The model rejects these tools: {_sentence(error.message)}", param="tools") from error
        except MistralCommonException as error:
            raise invalid(f"The model rejects this chat: {_sentence(error.message)}", param="messages") from error
        except ValueError as error:
            if "Regex error" in str(error):
                _refuse_text(error, "messages")
            raise invalid(f"The model rejects this chat: {_sentence(str(error))}", param="messages") from error
        except RecursionError as error:
            raise invalid(
                "The chat is nested too deeply for the model's tokenizer.", param="tools" if chat.tools else "messages"
            ) from error
        except (AssertionError, NotImplementedError, KeyError, TypeError) as error:
            raise invalid("The model's tokenizer does not support this kind of chat.", param="messages") from error
        return ids

    def _adapted(self, message: Message) -> Message:
        """Returns a message in the form that mistral-common reads."""
        read = STANDARD_FIELDS if self._supports_reasoning else ()
        adapted = {name: value for name, value in message.items() if name in read or name not in REASONING_FIELDS}
        if isinstance(content := message.get("content"), list):
            adapted["content"] = [
                IMAGE_PART if part["type"] == "image" else {"type": "text", "text": part[part["type"]]}
                for part in content
            ]
        return adapted

    def _probe(self, messages: list[Message], tools: list[Tool] | None) -> str | None:
        """Returns a conversation as mistral-common shows it; None if it does not."""
        continued = messages[-1]["role"] == "assistant"
        try:
            request = ChatCompletionRequest.from_openai(messages, tools, continue_final_message=continued)
            return self.decode(self._tokenizer.encode_chat_completion(request).tokens)
        except Exception:  # as many types as reasons
            return None


def _allow_text_with_calls(tokenizer: Tokenizer[Any, Any, Any, Any, Any]) -> None:
    """Lets old versions encode text and calls in one turn, which their models generate, one after the other."""
    instruct: Any = tokenizer.instruct_tokenizer
    if instruct.tokenizer.version >= TokenizerVersion.v7:
        return
    validator: Any = tokenizer._chat_completion_request_validator
    validator._allow_tool_call_and_content = True
    encode = instruct.encode_assistant_message

    def encode_both(message: Any, is_before_last_user_message: bool) -> list[int]:
        if not (message.content and message.tool_calls):
            ids: list[int] = encode(message, is_before_last_user_message)
            return ids
        calls = encode(message.model_copy(update={"content": None}), is_before_last_user_message)
        text = message.model_copy(update={"tool_calls": None, "prefix": bool(calls)})
        return [*encode(text, is_before_last_user_message), *calls]

    instruct.encode_assistant_message = encode_both


def _leave_text_out(tokenizer: Tokenizer[Any, Any, Any, Any, Any]) -> None:
    """Makes mistral-common leave out the text of a chat's ids, which it decodes for every chat; only ids are used."""
    instruct: Any = tokenizer.instruct_tokenizer
    instruct.decode = lambda tokens, special_token_policy: ""


def _check_results(messages: list[Message]) -> None:
    for index, message in enumerate(messages):
        if message["role"] == "tool" and not isinstance(message.get("tool_call_id"), str):
            raise invalid(
                f"messages[{index}].tool_call_id is missing; set it to the id of the tool call.",
                param=f"messages[{index}].tool_call_id",
            )


def _shows_images(chat: ChatRequest) -> bool:
    for message in chat.messages:
        content = message.get("content")
        if isinstance(content, list) and any(part["type"] == "image" for part in content):
            return True
    return False


def _in_order(messages: list[Message]) -> list[Message]:
    """Returns the messages with the role user for each system message that the format does not allow at its place."""
    ordered: list[Message] = []
    for message in messages:
        misplaced = (
            message["role"] in ("system", "developer") and ordered and ordered[-1]["role"] in ("assistant", "tool")
        )
        ordered.append({**message, "role": "user"} if misplaced else message)
    return ordered


def _extra_arguments(chat: ChatRequest) -> dict[str, Any]:
    """Returns extra arguments for mistral-common; rejects those it does not support."""
    if chat.chat_template:
        raise invalid("This model's tokenizer does not support chat templates; omit it.", param="chat_template")
    if chat.documents:
        raise invalid("This model's tokenizer does not support documents; omit them.", param="documents")
    for name in chat.template_kwargs:
        if name != EFFORT:
            raise invalid(
                f"This model's tokenizer does not support {quoted(name)}; omit it.",
                param=f"chat_template_kwargs.{name}",
            )
    return chat.template_kwargs


def _sentence(text: str) -> str:
    first = first_line(text, 300)
    return first if first.endswith(".") else f"{first}."


def _refuse_text(error: Exception, param: str) -> NoReturn:
    if isinstance(error, UnicodeError | TypeError):
        raise invalid("The prompt cannot be tokenized; send valid Unicode.", param=param) from error
    raise invalid(
        "The prompt contains a run of whitespace that is too long to tokenize; shorten it.", param=param
    ) from error


def _tokenizer_file(path: Path) -> Path:
    if path.is_file():
        return path
    for pattern in _PATTERNS:
        if files := sorted(path.glob(pattern)):
            return files[-1]
    raise invalid(f"{path} contains no Mistral tokenizer; add tekken.json.", param="model")
