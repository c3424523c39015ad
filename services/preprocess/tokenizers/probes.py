"""A fixed set of chats that shows whether two tokenizers produce the same prompts."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from typing import Any

from services.common.base.errors import SluiceError
from services.common.base.packing import pack_u32
from services.common.types.media.facts import AudioFacts, ImageFacts, MediaFacts, VideoFacts
from services.common.types.media.spans import content_hash
from services.preprocess.contract.tokenizer import ChatRequest, Message, TokenizerProtocol, kinds_of
from services.preprocess.media.expansion import CountedItem, expand
from services.preprocess.media.samples import FRAME_RATE, SAMPLE_RATE, sample_avi, sample_png, sample_wav

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
SAMPLE_CLIPS = (16_000, 100_001)
"""Samples of the sample clips of audio."""
SAMPLE_VIDEOS = ((64, 64, 4), (400, 300, 7))
"""Width, height and frames of the sample videos."""


def media_fingerprint(tokenizer: TokenizerProtocol) -> str:
    """Returns the same as `prompt_fingerprint` for a chat with each sample item; empty if the tokenizer takes none.

    The sample images come first, then audio and videos, "-" where the tokenizer takes none of that kind.
    """
    kinds = kinds_of(tokenizer)
    if not kinds:
        return ""
    return ",".join(_media_digest(tokenizer, facts) if facts.kind in kinds else REFUSED for facts in _samples())


def _samples() -> Iterator[MediaFacts]:
    yield from (ImageFacts(*size, "PNG") for size in SAMPLE_SIZES)
    yield from (AudioFacts(samples, SAMPLE_RATE, "WAV") for samples in SAMPLE_CLIPS)
    yield from (VideoFacts(*video, FRAME_RATE, "MP4") for video in SAMPLE_VIDEOS)


def _media_digest(tokenizer: TokenizerProtocol, facts: MediaFacts) -> str:
    reference = {"type": facts.kind.capability, "media": 0}
    chat = ChatRequest([{"role": "user", "content": [{"type": "text", "text": "Describe: "}, reference]}])
    sample = CountedItem("messages[0].content[1]", content_hash(repr(facts).encode()), facts)
    try:
        packed = _packed(tokenizer, chat, sample)
    except SluiceError as error:
        log.warning("a sample media item is refused: %s", error.message)
        return REFUSED
    return hashlib.sha256(packed).hexdigest()[:DIGEST_CHARS]


def _packed(tokenizer: Any, chat: ChatRequest, sample: CountedItem) -> bytes:
    """Returns the packed ids of a chat with a sample."""
    rules = tokenizer.media_rules
    if rules:
        return expand(pack_u32(tokenizer.encode_chat(chat)), rules, [sample])[0]
    packed: bytes = tokenizer.pack_media(chat, [sample], [_file(sample.facts)])[0]
    return packed


def _file(facts: MediaFacts) -> bytes:
    if isinstance(facts, AudioFacts):
        return sample_wav(facts.samples, facts.rate)
    if isinstance(facts, VideoFacts):
        return sample_avi(facts.width, facts.height, facts.frames)
    assert isinstance(facts, ImageFacts)
    return sample_png(facts.width, facts.height)


def _digest(tokenizer: TokenizerProtocol, chat: ChatRequest) -> str:
    try:
        ids = tokenizer.encode_chat(chat)
    except SluiceError:
        return REFUSED
    except Exception:  # a custom class may raise anything; requests report it
        log.warning("a tokenizer failed on a probe chat", exc_info=True)
        return REFUSED
    return hashlib.sha256(pack_u32(ids)).hexdigest()[:DIGEST_CHARS]
