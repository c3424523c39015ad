"""The interface of an engine's tokenizer module, and the JSON form of its calls and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from services.common.base.errors import ErrorKind, SluiceError, first_line, invalid
from services.preprocess.contract.tokenizer import ChatRequest

PARAMS = ("messages", "tools", "documents", "chat_template", "chat_template_kwargs", "tool_choice")


@dataclass(frozen=True)
class EngineFacts:
    """Facts an engine reports about a tokenizer.

    Attributes:
        version: version of the engine's package.
        vocab_size: upper bound (exclusive) of ids.
        eos_ids: the tokenizer's own end-of-sequence ids.
        context_length: as read by the engine from the model's files; 0 for unknown.
        chat_template: the model's own; empty for none.
        has_chat_template: whether chats work without a template in the request.
        media: kinds of media items that chats may have, see `encode_media`.
        no_images: why they may have no images, as a sentence; may be empty.
    """

    version: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    context_length: int
    chat_template: str
    has_chat_template: bool
    media: tuple[str, ...] = ()
    no_images: str = ""


@dataclass(frozen=True)
class MediaPrompt:
    """The prompt of a chat with media items, as the engine makes it.

    Attributes:
        ids: with the tokens of each item.
        unexpanded_ids: with the placeholders that the engine would replace by those.
        spans: kind, offset in `ids` and number of tokens of each item, in their order.
    """

    ids: list[int]
    unexpanded_ids: list[int]
    spans: list[tuple[str, int, int]]


class EngineTokenizer(Protocol):
    """The class `Tokenizer(path)` of an engine's module; its methods are those of TokenizerProtocol."""

    facts: EngineFacts

    def encode_chat(self, chat: ChatRequest) -> list[int]: ...

    def encode_media(self, chat: ChatRequest) -> MediaPrompt:
        """Returns the prompt of a chat whose items are parts of the types `image_url`, `audio_url` and `video_url`."""
        ...

    def render(self, chat: ChatRequest) -> str: ...

    def encode_text(self, text: str, add_special_tokens: bool | None = None) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...


class LibraryTokenizer:
    """Texts through the tokenizer that an engine has loaded, which has the methods of transformers."""

    _tokenizer: Any

    def encode_media(self, chat: ChatRequest) -> MediaPrompt:
        raise invalid(
            "This tokenizer takes no media items; leave them out.", param="messages", code="media_not_supported"
        )

    def encode_text(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        special = add_special_tokens is not False
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=special)]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text


def answer(tokenizer: EngineTokenizer, verb: str, argument: dict[str, Any]) -> Any:
    """Returns the result of one call; `argument` is the JSON form of the method's parameters."""
    if verb == "encode_chat":
        return tokenizer.encode_chat(ChatRequest(**argument))
    if verb == "encode_media":
        return asdict(tokenizer.encode_media(ChatRequest(**argument)))
    if verb == "render":
        return _clean(tokenizer.render(ChatRequest(**argument)))
    if verb == "encode_text":
        return tokenizer.encode_text(**argument)
    if verb == "decode":
        return _clean(tokenizer.decode(**argument))
    raise ValueError(f"unknown verb {verb}")


def chat_argument(chat: ChatRequest) -> dict[str, Any]:
    """Returns the JSON form of a chat."""
    return dict(vars(chat))


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def error_form(error: Exception) -> dict[str, Any]:
    """Returns the JSON form of an error; an engine's exceptions count as errors of the request."""
    if not isinstance(error, SluiceError):
        error = _refusal(error)
    return {"kind": int(error.kind), "message": error.message, "param": error.param, "code": error.code}


def read_error(form: dict[str, Any]) -> SluiceError:
    """Returns the error of a JSON form."""
    return SluiceError(ErrorKind(form["kind"]), form["message"], param=form["param"], code=form["code"])


def _refusal(error: Exception) -> SluiceError:
    if isinstance(error, MemoryError):
        return SluiceError(
            ErrorKind.INVALID_ARGUMENT, "The prompt requires too much memory; shorten it.", param="messages"
        )
    if isinstance(error, RecursionError):
        return SluiceError(ErrorKind.INVALID_ARGUMENT, "The prompt is nested too deeply; flatten it.", param="messages")
    errors = getattr(error, "errors", None)
    if callable(errors):  # pydantic's
        first = errors()[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        where = ".".join(str(step) for step in first["loc"])
        message = f"The engine rejected this request: {where}: {first['msg']}."
        return SluiceError(ErrorKind.INVALID_ARGUMENT, message, param=field if field in PARAMS else "messages")
    reason = first_line(error, 300).rstrip(".")
    message = f"The engine rejected this request: {reason}." if reason else "The engine rejected this request."
    return SluiceError(ErrorKind.INVALID_ARGUMENT, message, param="messages")
