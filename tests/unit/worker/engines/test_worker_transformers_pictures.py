"""Pictures of prompts in the transformers engine, before torch sees them."""

from __future__ import annotations

import asyncio
import io
import threading
from array import array

import pytest
from PIL import Image

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.types.media.spans import MediaFile, MediaKind, MediaSpan
from services.worker.contract.generation import GenerateRequest, MediaItem
from services.worker.engines.transformers.picture_queue import PictureQueue
from services.worker.engines.transformers.pictures import check_placeholders, open_picture
from tests.support.oracles.errors import raises_error

PLACEHOLDER = 9


def item(offset: int, length: int) -> MediaItem:
    span = MediaSpan(MediaKind.IMAGE, bytes(16), offset, length, array("I", [PLACEHOLDER]).tobytes())
    return MediaItem(span, MediaFile(bytes(16), b"file"))


def prompt(ids: list[int], *media: MediaItem, resumed: int = 0) -> GenerateRequest:
    return GenerateRequest("r", "tiny", array("I", ids), media=media, resumed_tokens=resumed)


def encoded(image: Image.Image, form: str, **options: object) -> MediaFile:
    file = io.BytesIO()
    image.save(file, form, **options)
    return MediaFile(bytes(16), file.getvalue())


@pytest.mark.parametrize(
    "request_",
    [
        prompt([1, 2]),
        prompt([1, 9, 9, 2], item(1, 2)),
        prompt([9, 9, 9, 9], item(0, 2), item(2, 2)),
        prompt([1, 9, 9, 2, 9], item(1, 2), resumed=1),
        prompt([1, 2, 9], resumed=2),
    ],
)
def test_check_placeholders_with_an_item_for_each_accepts_the_prompt(request_: GenerateRequest) -> None:
    check_placeholders(request_, PLACEHOLDER)


@pytest.mark.parametrize(
    "request_",
    [
        prompt([1, 9, 2]),
        prompt([1, 9, 9, 2, 9], item(1, 2)),
        prompt([1, 9, 9, 2], item(1, 1)),
        prompt([1, 9, 9, 2], item(1, 3)),
        prompt([1, 9, 9, 2], item(2, 2)),
        prompt([1, 9, 9, 2], item(0, 2)),
        prompt([1, 2, 3], item(1, 1)),
        prompt([1, 9, 9, 2], item(1, 2), item(1, 2)),
        prompt([1, 9, 2, 9], resumed=1),
    ],
)
def test_check_placeholders_with_a_wrong_count_raises(request_: GenerateRequest) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="media"):
        check_placeholders(request_, PLACEHOLDER)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_open_picture_returns_rgb_of_every_accepted_format(form: str) -> None:
    opened = open_picture(encoded(Image.new("L", (30, 20), 128), form))
    assert (opened.mode, opened.size) == ("RGB", (30, 20))


def test_open_picture_rotates_as_the_metadata_declares() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert open_picture(encoded(Image.new("RGB", (30, 20)), "JPEG", exif=exif)).size == (20, 30)


def test_open_picture_with_too_many_pixels_raises_before_it_decodes() -> None:
    file = encoded(Image.new("RGB", (30, 20)), "PNG")
    truncated = MediaFile(file.hash, file.data[:60])
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, code="invalid_media", match="30 x 20 pixels"):
        open_picture(truncated, most_pixels=599)
    assert open_picture(file, most_pixels=600).size == (30, 20)


def test_open_picture_that_claims_an_enormous_size_raises() -> None:
    data = bytearray(encoded(Image.new("RGB", (30, 20)), "BMP").data)
    data[18:26] = (30_000).to_bytes(4, "little") * 2
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, code="invalid_media", match="pixels"):
        open_picture(MediaFile(bytes(16), bytes(data)))


@pytest.mark.parametrize("data", [b"", b"no picture", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"])
def test_open_picture_of_another_format_raises(data: bytes) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, code="invalid_media", param="media"):
        open_picture(MediaFile(bytes(16), data))


def test_open_picture_of_a_truncated_file_raises() -> None:
    file = encoded(Image.effect_noise((100, 100), 90), "PNG")
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, code="invalid_media"):
        open_picture(MediaFile(file.hash, file.data[:-100]))


async def test_picture_queue_with_most_encoded_waits_for_a_release() -> None:
    queue = PictureQueue(2)
    assert [await queue.encode(key, lambda: True, lambda: 1) for key in "ab"] == [1, 1]
    waiting = asyncio.create_task(queue.encode("c", lambda: True, lambda: 3))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    queue.release("a")
    queue.release("a")
    assert await asyncio.wait_for(waiting, 20) == 3
    another = asyncio.create_task(queue.encode("d", lambda: True, lambda: 4))
    await asyncio.sleep(0.05)
    assert not another.done(), "a second release must not count"
    queue.release("b")
    assert await asyncio.wait_for(another, 20) == 4
    queue.close()


async def test_picture_queue_skips_work_of_a_request_that_has_ended() -> None:
    queue = PictureQueue(1)
    ran: list[int] = []

    def work() -> int:
        ran.append(1)
        return 1

    assert await queue.encode("a", lambda: False, work) is None
    assert not ran
    assert await queue.encode("b", lambda: True, lambda: 2) == 2
    queue.close()


async def test_picture_queue_whose_work_fails_makes_room_for_the_next() -> None:
    queue = PictureQueue(1)

    def fails() -> None:
        raise invalid("A picture is broken; send another.", param="media")

    for _ in range(3):
        with pytest.raises(SluiceError):
            await queue.encode("a", lambda: True, fails)
    assert await queue.encode("b", lambda: True, lambda: 2) == 2
    queue.close()


async def test_picture_queue_whose_caller_is_cancelled_makes_room_for_the_next() -> None:
    queue, held = PictureQueue(1), threading.Event()
    task = asyncio.create_task(queue.encode("a", lambda: True, lambda: held.wait(20)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.set()
    assert await asyncio.wait_for(queue.encode("b", lambda: True, lambda: 2), 20) == 2
    queue.close()
