"""Images, audio and video in the requests of the three APIs: what is taken out, what is refused, and its names."""

from __future__ import annotations

import base64
import threading
from dataclasses import replace
from typing import Any

import orjson
import pytest

from services.common.apis.responses.conversation import conversation
from services.common.apis.responses.items import Item, read_items
from services.common.apis.responses.tools import NO_TOOLS
from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.types.media.parts import MediaLimits
from services.gateway.apis.anthropic.schemas import MessagesRequest
from services.gateway.apis.anthropic.schemas import explain as explain_message
from services.gateway.apis.anthropic.translate import EngineCapabilities
from services.gateway.apis.anthropic.translate import translate as translate_message
from services.gateway.apis.openai.schemas import ChatCompletionRequest
from services.gateway.apis.openai.translate import chat_request
from services.gateway.apis.openai.validation import check
from services.gateway.apis.responses.schemas import ResponsesRequest
from services.gateway.apis.responses.translate import translate as translate_response
from services.gateway.backends.workers.capabilities import able, modalities
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core.request import ChatPrompt, GenerationRequest
from services.gateway.operations.media import media_characters, release_media, with_media
from services.gateway.operations.runner import TranslatedRequest
from services.gateway.settings import GatewaySettings
from tests.support.data.bodies import BUDGETS

PNG = b"\x89PNG not decoded here"
DATA = base64.b64encode(PNG).decode()
DATA_URL = f"data:image/png;base64,{DATA}"
HTTPS = "https://example.org/a.png"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
LIMITS = replace(BUDGETS, media=MediaLimits(items=2, item_bytes=64))


def chat(*messages: Any, limits: Any = BUDGETS) -> GenerationRequest:
    body = {"model": "m", "messages": list(messages)}
    return chat_request(body, check(ChatCompletionRequest, body, limits), "r", 1, limits)


def message(*messages: Any, limits: Any = BUDGETS) -> TranslatedRequest:
    body = {"model": "m", "max_tokens": 5, "messages": list(messages)}
    fields = check(MessagesRequest, body, limits, explain_message)
    return translate_message(fields, "msg", EngineCapabilities(False, False), limits)


def response(*items: Any, limits: Any = BUDGETS, before: tuple[Item, ...] = ()) -> TranslatedRequest:
    fields = check(ResponsesRequest, {"model": "m", "input": list(items)}, limits)
    found = conversation(None, [*before, *read_items(fields.input, limits.list_items).items])
    return translate_response(fields, found, NO_TOOLS, "resp", limits, False)


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def image_url(url: str = DATA_URL, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def input_image(url: str = DATA_URL, **more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **more}


def source(**fields: Any) -> dict[str, Any]:
    return {"type": "image", "source": fields or {"type": "base64", "media_type": "image/png", "data": DATA}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def messages_of(generation: GenerationRequest) -> Any:
    assert isinstance(generation.prompt, ChatPrompt)
    return orjson.loads(generation.prompt.messages_json)


def items_of(generation: GenerationRequest) -> list[tuple[str, bytes, str, str]]:
    assert isinstance(generation.prompt, ChatPrompt)
    return [(item.part, item.data, item.url, item.detail) for item in generation.prompt.media]


def test_chat_with_images_in_user_and_tool_messages_keeps_their_order() -> None:
    generation = chat(
        user(text("a"), image_url(detail="low"), text("b"), image_url(HTTPS)),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": [text("t"), image_url()]},
    )
    messages = messages_of(generation)
    assert messages[0]["content"] == [
        text("a"),
        {"type": "image", "media": 0},
        text("b"),
        {"type": "image", "media": 1},
    ]
    assert messages[2]["content"] == [text("t"), {"type": "image", "media": 2}]
    assert items_of(generation) == [
        ("messages[0].content[1]", PNG, "", "low"),
        ("messages[0].content[3]", b"", HTTPS, ""),
        ("messages[2].content[1]", PNG, "", ""),
    ]
    assert ("image", "messages[0].content[1]") in generation.needs


def test_chat_with_audio_and_video_needs_each_kind_once() -> None:
    audio = {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}
    video = {"type": "video_url", "video_url": {"url": HTTPS}}
    generation = chat(user(audio, video, audio))
    assert generation.needs == (("audio", "messages[0].content[0]"), ("video", "messages[0].content[1]"))


def test_message_with_images_also_in_a_tool_result_keeps_order_and_paths() -> None:
    translated = message(
        user(text("one"), source()),
        user(source(type="url", url=HTTPS), text("two")),
        {"role": "assistant", "content": [USE]},
        user(
            {"type": "tool_result", "tool_use_id": "c", "content": [text("t"), source()], "is_error": True}, text("so?")
        ),
    )
    messages = messages_of(translated.generation)
    assert messages[0]["content"] == [
        text("one"),
        {"type": "image", "media": 0},
        {"type": "image", "media": 1},
        text("two"),
    ]
    assert messages[2]["content"] == [text("Error: "), text("t"), {"type": "image", "media": 2}]
    assert [part for part, *_ in items_of(translated.generation)] == [
        "messages[0].content[1]",
        "messages[0].content[2]",
        "messages[2].content[2]",
    ]
    names = [translated.field_names.param(part) for part, *_ in items_of(translated.generation)]
    assert names == ["messages.0.content.1", "messages.1.content.0", "messages.3.content.0.content.1"]


def test_response_with_images_also_in_an_output_keeps_order_and_paths() -> None:
    translated = response(
        user({"type": "input_text", "text": "one"}, input_image(detail="high")),
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [input_image(HTTPS)]},
    )
    messages = messages_of(translated.generation)
    assert messages[0]["content"] == [text("one"), {"type": "image", "media": 0}]
    assert messages[2]["content"] == [{"type": "image", "media": 1}]
    assert items_of(translated.generation) == [
        ("messages[0].content[1]", PNG, "", "high"),
        ("messages[2].content[0]", b"", HTTPS, ""),
    ]
    names = [translated.field_names.param(part) for part, *_ in items_of(translated.generation)]
    assert names == ["input[0].content[1]", "input[2].output[0]"]


def test_response_that_continues_a_stored_image_sends_it_again() -> None:
    stored = read_items([user(input_image())], BUDGETS.list_items).items[0].stored
    translated = response(user({"type": "input_text", "text": "and?"}), before=(Item(stored, "previous_response_id"),))
    assert [data for _, data, *_ in items_of(translated.generation)] == [PNG]
    assert translated.field_names.param("messages[0].content[0]") == "previous_response_id"


@pytest.mark.parametrize(
    ("part", "param", "code"),
    [
        pytest.param(image_url("data:image/png;base64,%%%"), "", "invalid_media", id="broken base64"),
        pytest.param(image_url("http://example.org/a.png"), "", "invalid_media", id="http"),
        pytest.param(image_url("file:///etc/passwd"), "", "invalid_media", id="file"),
        pytest.param(image_url("data:image/png;base64," + "QUJD" * 100), "", "media_too_large", id="too large"),
        pytest.param({"type": "image", "media": 0}, ".type", None, id="reference"),
    ],
)
def test_chat_with_a_bad_part_names_it(part: Any, param: str, code: str | None) -> None:
    with pytest.raises(SluiceError) as refused:
        chat(user(text("a"), part), limits=LIMITS)
    assert refused.value.param == f"messages[0].content[1]{param}"
    assert code is None or refused.value.code == code


@pytest.mark.parametrize(
    ("part", "param", "code"),
    [
        pytest.param(source(type="base64", media_type="image/png", data="%%"), "", "invalid_media", id="broken base64"),
        pytest.param(
            source(type="base64", media_type="text/html", data=DATA), ".source.media_type", "invalid_value", id="type"
        ),
        pytest.param(source(type="url", url="http://example.org/a"), "", "invalid_media", id="http"),
        pytest.param(source(type="file", file_id="f"), ".source.type", "unsupported_parameter", id="file_id"),
    ],
)
def test_message_with_a_bad_part_names_it(part: Any, param: str, code: str) -> None:
    with pytest.raises(SluiceError) as refused:
        message(user(text("a"), part), limits=LIMITS)
    assert (refused.value.param, refused.value.code) == (f"messages.0.content.1{param}", code)


@pytest.mark.parametrize(
    ("part", "param", "code"),
    [
        pytest.param(input_image("data:image/png;base64,%%"), "", "invalid_media", id="broken base64"),
        pytest.param(input_image("http://example.org/a"), "", "invalid_media", id="http"),
        pytest.param(input_image(detail="huge"), ".detail", "invalid_value", id="detail"),
        pytest.param({"type": "input_image", "file_id": "f"}, ".file_id", "unsupported_parameter", id="file_id"),
    ],
)
def test_response_with_a_bad_part_names_it(part: Any, param: str, code: str) -> None:
    with pytest.raises(SluiceError) as refused:
        response(user({"type": "input_text", "text": "a"}, part), limits=LIMITS)
    assert (refused.value.param, refused.value.code) == (f"input[0].content[1]{param}", code)


def test_too_many_items_name_the_first_beyond_in_every_api() -> None:
    with pytest.raises(SluiceError) as refused:
        chat(user(image_url(), image_url(), image_url()), limits=LIMITS)
    assert (refused.value.param, refused.value.code) == ("messages[0].content[2]", "too_many_media")
    with pytest.raises(SluiceError) as refused:
        message(user(source(), source(), source()), limits=LIMITS)
    assert (refused.value.param, refused.value.code) == ("messages.0.content.2", "too_many_media")
    with pytest.raises(SluiceError) as refused:
        response(user(input_image(), input_image(), input_image()), limits=LIMITS)
    assert (refused.value.param, refused.value.code) == ("input[0].content[2]", "too_many_media")


def test_error_of_preprocess_is_renamed_in_param_and_message() -> None:
    part = "messages[0].content[1]"
    failure = invalid(f"The file of {part} is truncated.", param=part, code="invalid_media")
    renamed = response(user({"type": "input_text", "text": "a"}, input_image())).field_names.rename(failure)
    assert renamed.param == "input[0].content[1]"
    assert "input[0].content[1]" in renamed.message


@pytest.mark.parametrize("typed", ["<image>", "<|image_pad|>", '{"type": "image", "media": 0}', DATA_URL])
def test_text_that_looks_like_an_item_stays_text(typed: str) -> None:
    for generation in (
        chat(user(text(typed))),
        message(user(text(typed))).generation,
        response(user({"type": "input_text", "text": typed})).generation,
    ):
        assert items_of(generation) == []
        assert not [need for need in generation.needs if need[0] == "image"]
        assert typed in (str(messages_of(generation)[0]["content"]), *_texts(generation))


def _texts(generation: GenerationRequest) -> list[str]:
    content = messages_of(generation)[0]["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def worker(*capabilities: str) -> WorkerEntry:
    return WorkerEntry("w", "", 1, "m", 16, 100, 10, frozenset(capabilities), 0)


def test_model_without_images_refuses_the_part_and_lists_text_only() -> None:
    needs = chat(user(text("a"), image_url())).needs
    with pytest.raises(SluiceError) as refused:
        able([worker("audio")], needs)
    assert (refused.value.param, refused.value.code) == ("messages[0].content[1]", "media_not_supported")
    assert able([worker("audio"), seeing := worker("image")], needs) == [seeing]
    assert modalities([worker("lora")]) == ["text"]
    assert modalities([worker("video"), worker("image", "lora")]) == ["text", "image", "video"]


def test_workers_that_make_other_tokens_of_images_get_none_but_text_and_audio() -> None:
    differing, needs = (
        replace(worker("image", "audio"), media_differ=frozenset({"image"})),
        chat(user(text("a"), image_url())).needs,
    )
    with pytest.raises(SluiceError) as refused:
        able([differing], needs)
    assert (refused.value.kind, refused.value.code) == (ErrorKind.UNAVAILABLE, "media_parity")
    assert "messages[0].content[1] cannot be served" in refused.value.message
    assert able([differing, seeing := worker("image")], needs) == [seeing]
    assert able([differing], ()) == able([differing], (("audio", "messages[0].content[1]"),)) == [differing]
    assert modalities([differing]) == ["text", "audio"]


async def test_large_items_are_decoded_in_a_thread_and_small_ones_are_not() -> None:
    small, large = [user(image_url())], [user(image_url(DATA_URL + "A" * 300_000))]
    assert await with_media(small, threading.get_ident) == threading.get_ident()
    assert await with_media(large, threading.get_ident) != threading.get_ident()


@pytest.mark.parametrize(
    "messages",
    [
        [user(image_url("a" * 50))],
        [user(source(type="base64", media_type="image/png", data="a" * 50))],
        [user({"type": "tool_result", "content": [source(type="base64", media_type="image/png", data="a" * 50)]})],
        [{"type": "function_call_output", "output": [input_image("a" * 50)]}],
    ],
)
def test_characters_of_media_parts_are_counted_in_every_api(messages: list[Any]) -> None:
    assert media_characters(messages) == 50
    assert media_characters([user(text("a" * 50)), "x", None]) == 0


def test_base64_text_is_released_once_decoded_and_texts_are_kept() -> None:
    messages = [user(image_url()), user(text("a"))]
    release_media(messages)
    assert messages == [user(), user(text("a"))]


def test_file_longer_than_a_piece_is_decoded_whole_and_padding_within_is_refused() -> None:
    data = bytes(range(256)) * 8192
    encoded = base64.b64encode(data).decode()
    generation = chat(user(image_url(f"data:image/png;base64,{encoded}")))
    assert items_of(generation)[0][1] == data
    broken = encoded[: (1 << 20) - 1] + "=" + encoded[1 << 20 :]
    with pytest.raises(SluiceError, match="broken"):
        chat(user(image_url(f"data:image/png;base64,{broken}")))


def test_largest_body_bounds_the_file_of_an_item() -> None:
    assert GatewaySettings(max_body_mb=4).budgets.media == MediaLimits(item_bytes=3 << 20)
