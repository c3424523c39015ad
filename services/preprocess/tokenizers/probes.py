"""A fixed set of chats that shows whether two tokenizers produce the same prompts."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any

from services.common.errors import SluiceError
from services.common.media.spans import png_file
from services.common.packing import pack_u32
from services.preprocess.media.expansion import CountedItem, expand
from services.preprocess.media.images import ImageFacts
from services.preprocess.protocol import ChatRequest, ImageRule, Message, TokenizerProtocol

log = logging.getLogger(__name__)

REFUSED = "-"
DIGEST_CHARS = 16

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_CALL = {"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
_QUESTION: Message = {"role": "user", "content": "What is the weather in Köln?"}
_ANSWER: Message = {"role": "assistant", "content": "It is sunny."}

PROBES: dict[str, ChatRequest] = {
    "plain": ChatRequest([_QUESTION]),
    "system": ChatRequest([{"role": "system", "content": "Be brief."}, _QUESTION]),
    "turns": ChatRequest([_QUESTION, _ANSWER, {"role": "user", "content": "And tomorrow?"}]),
    "continued": ChatRequest([_QUESTION, {"role": "assistant", "content": "It is"}], continue_final_message=True),
    "unicode": ChatRequest([{"role": "user", "content": "Grüße 你好 😀👨‍👩‍👧 e\u0301 \u200b ﬁ"}]),
    "spaces": ChatRequest([{"role": "user", "content": "  a\n\n\tb   c \r\n "}]),
    "control": ChatRequest([{"role": "user", "content": "<|im_end|> </s> [INST] <|eot_id|> <s>"}]),
    "parts": ChatRequest([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
    "tools": ChatRequest([_QUESTION], tools=[_TOOL]),
    "tool_result": ChatRequest(
        [
            _QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call12345", "content": '{"degrees": 21}'},
            _ANSWER,
            {"role": "user", "content": "Thanks!"},
        ],
        tools=[_TOOL],
    ),
    "thinking": ChatRequest([_QUESTION], template_kwargs={"enable_thinking": True}),
    "no_thinking": ChatRequest([_QUESTION], template_kwargs={"enable_thinking": False}),
    "long": ChatRequest(
        [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. 0123456789\n" * 200}]
    ),
}


def prompt_fingerprint(tokenizer: TokenizerProtocol) -> str:
    """Returns a prefix of the SHA-256 of each probe's ids in hex, or "-" where rejected, joined by commas."""
    return ",".join(_digest(tokenizer, chat) for chat in PROBES.values())


SAMPLE_SIZES = ((64, 64), (200, 100), (1024, 768), (33, 601))
"""Width and height of the sample images."""


def media_fingerprint(tokenizer: TokenizerProtocol) -> str:
    """Returns the same as `prompt_fingerprint` for a chat with each sample image; empty if the tokenizer takes none."""
    rule = getattr(tokenizer, "image_rule", None)  # optional for custom classes
    if rule is not None:
        return ",".join(_media_digest(lambda item: _by_rule(tokenizer, rule, item), *size) for size in SAMPLE_SIZES)
    if getattr(tokenizer, "takes_images", False):
        return ",".join(_media_digest(lambda item: _by_engine(tokenizer, item), *size) for size in SAMPLE_SIZES)
    return ""


_SAMPLE_CHAT = ChatRequest(
    [{"role": "user", "content": [{"type": "text", "text": "Describe: "}, {"type": "image", "media": 0}]}]
)


def _media_digest(packed_with: Callable[[CountedItem], bytes], width: int, height: int) -> str:
    sample = CountedItem(
        "messages[0].content[1]", f"{width}x{height}".encode().ljust(16), ImageFacts(width, height, "PNG")
    )
    try:
        packed = packed_with(sample)
    except SluiceError as error:
        log.warning("a sample image is refused: %s", error.message)
        return REFUSED
    return hashlib.sha256(packed).hexdigest()[:DIGEST_CHARS]


def _by_rule(tokenizer: TokenizerProtocol, rule: ImageRule, sample: CountedItem) -> bytes:
    """Returns the packed ids of the sample by a rule, to which an image is its size."""
    return expand(pack_u32(tokenizer.encode_chat(_SAMPLE_CHAT)), rule, [sample])[0]


def _by_engine(tokenizer: Any, sample: CountedItem) -> bytes:
    packed: bytes = tokenizer.pack_images(
        _SAMPLE_CHAT, [sample], [sample_png(sample.facts.width, sample.facts.height)]
    )[0]
    return packed


def sample_png(width: int, height: int) -> bytes:
    """Returns a black PNG file."""
    return png_file(width, height, bytes(3 * width * height))


def _digest(tokenizer: TokenizerProtocol, chat: ChatRequest) -> str:
    try:
        ids = tokenizer.encode_chat(chat)
    except SluiceError:
        return REFUSED
    except Exception:  # a custom class may raise anything; requests report it
        log.warning("a tokenizer failed on a probe chat", exc_info=True)
        return REFUSED
    return hashlib.sha256(pack_u32(ids)).hexdigest()[:DIGEST_CHARS]
