"""Media items in messages and in block hashes."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import pack_u32
from services.common.rpc.media import input_messages, read_inputs, read_spans, span_messages
from services.common.types.hashing import block_hashes, chain, local_hash
from services.common.types.media.parts import MediaLimits, take_media
from services.common.types.media.spans import MediaKind, MediaSpan, content_hash, items_within, png_file

PNG = b"\x89PNG not really"
DATA_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
LIMITS = MediaLimits(items=2, item_bytes=64)


def image(url: str = DATA_URL, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_take_media_with_images_leaves_references_in_order() -> None:
    text = {"type": "text", "text": "and"}
    messages = [
        {"role": "system", "content": "Look."},
        user(image(detail="low"), text),
        {"role": "tool", "tool_call_id": "1", "content": [image("https://example.org/a.png")]},
    ]
    left, items = take_media(messages, LIMITS)
    assert left[0] is messages[0]
    assert left[1]["content"] == [{"type": "image", "media": 0}, text]
    assert left[2] == {"role": "tool", "tool_call_id": "1", "content": [{"type": "image", "media": 1}]}
    assert [(each.part, each.data, each.url, each.detail) for each in items] == [
        ("messages[1].content[0]", PNG, "", "low"),
        ("messages[2].content[0]", b"", "https://example.org/a.png", ""),
    ]
    assert items[0].media_type == ""  # images are what they contain, whatever their label
    assert messages[1]["content"][0]["type"] == "image_url"


def test_take_media_without_items_returns_the_same_messages() -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Hi."},
        user({"type": "text", "text": "a"}),
        "not a message",
        None,
    ]
    left, items = take_media(messages, LIMITS)
    assert items == []
    assert all(one is other for one, other in zip(left, messages, strict=True))


def test_take_media_with_audio_and_video_names_their_kinds() -> None:
    data = base64.b64encode(b"RIFF").decode()
    audio = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    video = {"type": "video_url", "video_url": {"url": "https://example.org/v.mp4"}}
    left, items = take_media([user(audio, video)], LIMITS)
    assert left[0]["content"] == [{"type": "audio", "media": 0}, {"type": "video", "media": 1}]
    assert [each.kind for each in items] == [MediaKind.AUDIO, MediaKind.VIDEO]
    assert items[0].media_type == "audio/wav"


@pytest.mark.parametrize(
    ("part", "param", "code"),
    [
        (image("data:image/png;base64,%%%"), "messages[0].content[1]", "invalid_media"),
        (image("data:image/png;base64,QUI"), "messages[0].content[1]", "invalid_media"),
        (image("data:image/png;base64,"), "messages[0].content[1]", "invalid_media"),
        (image("data:image/png,abc"), "messages[0].content[1]", "invalid_media"),
        (image("http://example.org/a.png"), "messages[0].content[1]", "invalid_media"),
        (image("file:///etc/passwd"), "messages[0].content[1]", "invalid_media"),
        (image("https://example.org/" + "a" * 9_000), "messages[0].content[1]", "invalid_media"),
        (image("data:image/png;base64," + "QUJD" * 100), "messages[0].content[1]", "media_too_large"),
        (image(detail="huge"), "messages[0].content[1].image_url.detail", ""),
        ({"type": "image_url"}, "messages[0].content[1].image_url", ""),
        ({"type": "image", "media": 0}, "messages[0].content[1].type", ""),
        ({"type": "input_audio", "input_audio": {"data": "QUJD", "format": "exe"}},
         "messages[0].content[1].input_audio.format", ""),
        ({"type": "input_audio", "input_audio": {"data": "QUJD", "format": ["wav"]}},
         "messages[0].content[1].input_audio.format", ""),
    ],
)  # fmt: skip
def test_take_media_of_a_bad_part_names_it(part: Any, param: str, code: str) -> None:
    with pytest.raises(SluiceError) as refused:
        take_media([user({"type": "text", "text": "a"}, part)], LIMITS)
    assert (refused.value.param, refused.value.code) == (param, code)


def test_take_media_of_too_many_items_names_the_first_beyond() -> None:
    with pytest.raises(SluiceError) as refused:
        take_media([user(image(), image()), user(image())], LIMITS)
    assert (refused.value.param, refused.value.code) == ("messages[1].content[0]", "too_many_media")


def test_take_media_of_too_many_bytes_names_the_first_file_beyond() -> None:
    messages = [user(image(), image()), user(image())]
    size = sum(len(item.data) for item in take_media(messages, MediaLimits())[1])
    assert len(take_media(messages, MediaLimits(total_bytes=size))[1]) == 3
    with pytest.raises(SluiceError) as refused:
        take_media(messages, MediaLimits(total_bytes=size - 1))
    assert (refused.value.kind, refused.value.code) == (ErrorKind.TOO_LARGE, "media_too_large")
    assert refused.value.param == "messages[1].content[0]"


def span(offset: int, length: int, content: bytes = b"a") -> MediaSpan:
    return MediaSpan(MediaKind.IMAGE, content_hash(content), offset, length)


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (8, 0), (9, 1), (14, 1), (15, 2), (99, 2)])
def test_items_within_counts_items_that_end_among_the_first_tokens(tokens: int, expected: int) -> None:
    assert items_within([span(4, 5), span(9, 6)], tokens) == expected


def test_block_hashes_with_media_differ_only_from_its_first_block_on() -> None:
    tokens = list(range(32))
    plain = block_hashes(tokens, 4)
    one = block_hashes(tokens, 4, media=[span(9, 6)])
    other = block_hashes(tokens, 4, media=[span(9, 6, b"b")])
    assert one[:2] == plain[:2] == other[:2]
    assert not set(one[2:]) & set(plain[2:])
    assert not set(one[2:]) & set(other[2:])


def test_block_hashes_with_media_append_the_items_of_each_block_in_order() -> None:
    tokens = list(range(12))
    media = [span(1, 2, b"a"), span(3, 6, b"b")]
    first = local_hash(pack_u32(tokens[:4]) + media[0].hash + media[1].hash)
    second = chain(first, local_hash(pack_u32(tokens[4:8]), media=[media[1].hash]))
    third = chain(second, local_hash(pack_u32(tokens[8:]) + media[1].hash))
    assert block_hashes(tokens, 4, media=media).tolist() == [first, second, third]


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 9), st.integers(0, 5))
def test_block_hashes_of_a_suffix_with_shifted_media_continue_the_prefix(
    offset: int, length: int, block: int, at: int
) -> None:
    tokens = list(range(90))
    cut = at * block
    whole = block_hashes(tokens, block, media=[span(offset, length)])
    rest = block_hashes(tokens[cut:], block, parent=whole[at - 1] if at else None, media=[span(offset - cut, length)])
    assert rest == whole[at:]


def test_swapped_items_share_no_block_from_the_first_of_them_on() -> None:
    tokens = list(range(24))
    one = block_hashes(tokens, 4, media=[span(4, 4, b"a"), span(12, 4, b"b")])
    other = block_hashes(tokens, 4, media=[span(4, 4, b"b"), span(12, 4, b"a")])
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])


def test_spans_and_inputs_survive_their_messages() -> None:
    spans = (span(0, 3), MediaSpan(MediaKind.VIDEO, content_hash(b"v"), 5, 7, pack_u32([9]), 400))
    assert read_spans(span_messages(spans), 12) == spans
    _, items = take_media([user(image(detail="high"), image("https://example.org/a"))], LIMITS)
    assert read_inputs(input_messages(items)) == items


@pytest.mark.parametrize(
    "spans",
    [
        (span(3, 3), span(5, 2)),
        (span(8, 3),),
        (span(0, 0),),
        (MediaSpan(MediaKind.IMAGE, b"short", 0, 1),),
        (MediaSpan(MediaKind.IMAGE, content_hash(b""), 0, 1, b"odd"),),
    ],
)
def test_spans_that_cannot_be_are_refused(spans: tuple[MediaSpan, ...]) -> None:
    with pytest.raises(SluiceError, match=r"[mM]edia"):
        read_spans(span_messages(spans), 10)


@pytest.mark.parametrize(("mode", "colours"), [("L", 1), ("RGB", 3)])
@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 5), (7, 3)])
def test_png_file_of_pixels_has_them_in_each_mode(mode: str, colours: int, width: int, height: int) -> None:
    pixels = bytes(index % 256 for index in range(width * height * colours))
    with Image.open(io.BytesIO(png_file(width, height, pixels))) as image:
        assert (image.mode, image.size, image.tobytes()) == (mode, (width, height), pixels)
