"""Converts chats and media items to and from messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.common.apis.prompts import ChatPrompt
from services.common.base.errors import invalid
from services.common.types.media.parts import MediaInput
from services.common.types.media.spans import HASH_BYTES, MediaFile, MediaKind, MediaSpan
from sluice.v1 import common_pb2, preprocess_pb2

MAX_SPANS = 1_024
"""Media items of a prompt between services; more are refused with INVALID_ARGUMENT."""


def span_messages(spans: Iterable[MediaSpan]) -> list[common_pb2.MediaSpan]:
    """Returns the messages of spans."""
    return [
        common_pb2.MediaSpan(
            kind=int(span.kind),  # type: ignore[arg-type]
            hash=span.hash,
            offset=span.offset,
            length=span.length,
            unexpanded_ids=span.unexpanded_ids,
            encoder_tokens=span.encoder_tokens,
        )
        for span in spans
    ]


def read_spans(messages: Sequence[common_pb2.MediaSpan], tokens: int | None = None) -> tuple[MediaSpan, ...]:
    """Returns the spans of messages.

    Args:
        tokens: length of their prompt; None: unknown.

    Raises:
        SluiceError: INVALID_ARGUMENT for spans out of order, that overlap, or outside the prompt, and malformed hashes.
    """
    if len(messages) > MAX_SPANS:
        raise invalid(f"A prompt has at most {MAX_SPANS} media items.", param="media")
    spans = tuple(map(_span, messages))
    end = 0
    for span in spans:
        if span.offset < end or (tokens is not None and span.end > tokens):
            raise invalid("Media items must be in order, must not overlap and must lie in the prompt.", param="media")
        if len(span.hash) != HASH_BYTES or not span.length or len(span.unexpanded_ids) % 4:
            raise invalid(f"A media item needs a hash of {HASH_BYTES} bytes and at least one token.", param="media")
        end = span.end
    return spans


def _span(message: common_pb2.MediaSpan) -> MediaSpan:
    return MediaSpan(
        kind_of(message.kind),
        message.hash,
        message.offset,
        message.length,
        message.unexpanded_ids,
        message.encoder_tokens,
    )


def kind_of(number: int) -> MediaKind:
    """Returns the kind of a number received from a peer; raises SluiceError(INVALID_ARGUMENT) for an unknown one."""
    try:
        return MediaKind(number or MediaKind.IMAGE)
    except ValueError:
        raise invalid(f"Media kind {number} is unknown to this version.", param="media") from None


def chat_input(prompt: ChatPrompt, origin: str = "") -> preprocess_pb2.ChatInput:
    """Returns the message of a chat.

    Args:
        origin: for whom its chat template is rendered; empty: all such calls are one origin.
    """
    return preprocess_pb2.ChatInput(
        messages_json=prompt.messages_json,
        tools_json=prompt.tools_json,
        template_kwargs_json=prompt.template_kwargs_json,
        chat_template=prompt.chat_template,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        documents_json=prompt.documents_json,
        tool_choice_json=prompt.tool_choice_json,
        media=input_messages(prompt.media) if prompt.media else (),
        origin=origin,
    )


def input_messages(items: Iterable[MediaInput]) -> list[preprocess_pb2.MediaInput]:
    """Returns the messages of items as clients sent them."""
    return [
        preprocess_pb2.MediaInput(
            part=item.part,
            kind=int(item.kind),  # type: ignore[arg-type]
            media_type=item.media_type,
            detail=item.detail,
            **({"url": item.url} if item.url else {"data": item.data}),
        )
        for item in items
    ]


def read_inputs(messages: Iterable[preprocess_pb2.MediaInput]) -> list[MediaInput]:
    """Returns the items of messages; raises SluiceError(INVALID_ARGUMENT) for unknown kinds."""
    return [
        MediaInput(each.part, kind_of(each.kind), each.data, each.url, each.media_type, each.detail)
        for each in messages
    ]


def file_messages(files: Iterable[MediaFile]) -> list[common_pb2.MediaFile]:
    """Returns the messages of files."""
    return [common_pb2.MediaFile(hash=each.hash, data=each.data, media_type=each.media_type) for each in files]


def read_files(messages: Iterable[common_pb2.MediaFile]) -> list[MediaFile]:
    """Returns the files of messages."""
    return [MediaFile(each.hash, each.data, each.media_type) for each in messages]
