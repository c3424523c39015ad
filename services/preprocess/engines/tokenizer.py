"""What an engine's module has to offer, and how its answers and errors travel to the service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.common.errors import ErrorKind, SluiceError
from services.preprocess.protocol import ChatRequest

PARAMS = ("messages", "tools", "documents", "chat_template", "chat_template_kwargs", "tool_choice")


@dataclass(frozen=True)
class EngineFacts:
    """What the engine knows about a tokenizer.

    Attributes:
        version: of the engine's package.
        vocab_size: ids are below this.
        eos_ids: end-of-sequence ids of the tokenizer itself.
        context_length: as the engine reads the model's files; 0 for unknown.
        chat_template: the model's own; empty for none.
        has_chat_template: chats work without a template of their own.
    """

    version: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    context_length: int
    chat_template: str
    has_chat_template: bool


class EngineTokenizer(Protocol):
    """The class `Tokenizer(path)` of an engine's module; the methods are those of TokenizerProtocol."""

    facts: EngineFacts

    def encode_chat(self, chat: ChatRequest) -> list[int]: ...

    def render(self, chat: ChatRequest) -> str: ...

    def encode_text(self, text: str, add_special_tokens: bool | None = None) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...


def answer(tokenizer: EngineTokenizer, verb: str, argument: dict[str, Any]) -> Any:
    """One call; `argument` is the JSON form of the method's parameters."""
    if verb == "encode_chat":
        return tokenizer.encode_chat(ChatRequest(**argument))
    if verb == "render":
        return _clean(tokenizer.render(ChatRequest(**argument)))
    if verb == "encode_text":
        return tokenizer.encode_text(**argument)
    if verb == "decode":
        return _clean(tokenizer.decode(**argument))
    raise ValueError(f"no verb {verb}")


def chat_argument(chat: ChatRequest) -> dict[str, Any]:
    """The JSON form of a chat."""
    return dict(vars(chat))


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def error_form(error: Exception) -> dict[str, Any]:
    """The JSON form of an error. What an engine's code raises about a request is the request's fault."""
    if not isinstance(error, SluiceError):
        error = _refusal(error)
    return {"kind": int(error.kind), "message": error.message, "param": error.param, "code": error.code}


def read_error(form: dict[str, Any]) -> SluiceError:
    """The error behind a JSON form."""
    return SluiceError(ErrorKind(form["kind"]), form["message"], param=form["param"], code=form["code"])


def _refusal(error: Exception) -> SluiceError:
    if isinstance(error, MemoryError):
        return SluiceError(ErrorKind.INVALID_ARGUMENT, "The prompt needs too much memory.", param="messages")
    if isinstance(error, RecursionError):
        return SluiceError(ErrorKind.INVALID_ARGUMENT, "The prompt is nested too deeply.", param="messages")
    errors = getattr(error, "errors", None)
    if callable(errors):  # pydantic's
        first = errors()[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        where = ".".join(str(part) for part in first["loc"])
        said = f"The engine does not accept this request: {where}: {first['msg']}."
        return SluiceError(ErrorKind.INVALID_ARGUMENT, said, param=field if field in PARAMS else "messages")
    reason = str(error).strip().split("\n", 1)[0][:300].rstrip(".")
    said = (
        f"The engine does not accept this request: {reason}." if reason else "The engine does not accept this request."
    )
    return SluiceError(ErrorKind.INVALID_ARGUMENT, said, param="messages")
