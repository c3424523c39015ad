"""Files of every bad class, checked by the real limited process."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator

import pytest
from PIL import Image

from services.common.base.errors import ErrorKind, SluiceError
from services.common.types.media.facts import BadMedia, ImageFacts
from services.common.types.media.parts import MediaInput, MediaLimits
from services.common.types.media.spans import MediaKind, content_hash
from services.preprocess.media import loading
from services.preprocess.media.addresses import AllowedHosts, PublicAddresses
from services.preprocess.media.checking import NICENESS, MediaChecker
from services.preprocess.media.child import CLIPS
from services.preprocess.media.fetching import FetchLimits, MediaFetcher
from services.preprocess.media.https_get import HttpsGet
from services.preprocess.media.images import MAX_SCANS, check_image
from services.preprocess.media.limits import CheckLimits, ImageLimits
from services.preprocess.media.loading import MediaLoader
from tests.support.data.images import gif_of_frames, image_file, jpeg_of_scans, png_bomb, png_declaring
from tests.support.waiting import until

PART = "messages[2].content[1]"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'
LIMITS = CheckLimits(ImageLimits(pixels=4_000_000, side=8192, frames=64), limit_s=20.0, memory_mb=512)


@pytest.fixture
async def checker() -> AsyncIterator[MediaChecker]:
    checker = MediaChecker(LIMITS)
    yield checker
    await checker.close()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_check_image_of_each_format_returns_its_size(form: str) -> None:
    assert check_image(image_file(70, 40, form), LIMITS.images) == ImageFacts(70, 40, form)


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("size", [(1, 1), (7, 9), (8, 8), (1000, 3), (641, 479)])
@pytest.mark.parametrize("progressive", [False, True])
def test_check_image_of_a_jpeg_returns_its_declared_size(mode: str, size: tuple[int, int], progressive: bool) -> None:
    file = io.BytesIO()
    Image.new(mode, size).save(file, "JPEG", progressive=progressive)
    assert check_image(file.getvalue(), LIMITS.images) == ImageFacts(*size, "JPEG")


@pytest.mark.parametrize(("orientation", "size"), [(1, (70, 40)), (3, (70, 40)), (6, (40, 70)), (8, (40, 70))])
def test_check_image_rotated_by_metadata_returns_the_size_as_shown(orientation: int, size: tuple[int, int]) -> None:
    facts = check_image(image_file(70, 40, "JPEG", orientation=orientation), LIMITS.images)
    assert (facts.width, facts.height) == size


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9])
def test_check_image_truncated_raises(form: str, kept: float) -> None:
    whole = image_file(64, 64, form)
    with pytest.raises(BadMedia):
        check_image(whole[: int(len(whole) * kept)], LIMITS.images)


def test_check_image_of_a_jpeg_with_many_scans_raises() -> None:
    assert check_image(jpeg_of_scans(64, 64, MAX_SCANS), LIMITS.images) == ImageFacts(64, 64, "JPEG")
    with pytest.raises(BadMedia, match="scans"):
        check_image(jpeg_of_scans(64, 64, MAX_SCANS + 1), LIMITS.images)


def test_check_image_of_a_jpeg_counts_no_scans_in_its_metadata_or_behind_it() -> None:
    scan = b"\xff\xda\x00\x02"
    file = image_file(64, 64, "JPEG")
    comment = b"\xff\xfe" + (2 + len(scan) * 100).to_bytes(2, "big") + scan * 100
    for odd in (file + scan * 100, file[:2] + comment + file[2:]):
        assert check_image(odd, LIMITS.images) == ImageFacts(64, 64, "JPEG")


BAD_FILES = {
    "svg": (SVG, "formats"),
    "text": (b"not an image at all", "formats"),
    "pdf with a png behind": (b"%PDF-1.7\n" + image_file(8, 8), "formats"),
    "gif header with a script": (b"GIF89a/*" + b"a" * 40 + b"*/=1;alert(1)", "broken"),
    "png with a jpeg inside": (b"\x89PNG\r\n\x1a\n" + image_file(8, 8, "JPEG"), "broken"),
    "zero pixels wide": (png_declaring(0, 8), "broken|pixels"),
    "no frames": (gif_of_frames(0), "no pixels"),
    "pixels": (png_bomb(4000, 4000), "more than 4,000,000 pixels"),
    "declared pixels": (png_declaring(2_000, 2_001), "pixels"),
    "side": (png_declaring(60_000, 1), "side"),
    "gif of 100,000 frames": (gif_of_frames(100_000), "64 frames"),
    "canvas of a gif": (gif_of_frames(1, side=65_535), "side"),
    "missing data": (png_declaring(40, 40, b""), "broken"),
}


@pytest.mark.parametrize("name", BAD_FILES)
async def test_checker_bad_file_is_refused_by_name_within_bounded_memory(checker: MediaChecker, name: str) -> None:
    file, reason = BAD_FILES[name]
    with pytest.raises(SluiceError, match=reason) as caught:
        await checker.check(file, PART)
    assert (caught.value.kind, caught.value.param, caught.value.code) == (
        ErrorKind.INVALID_ARGUMENT,
        PART,
        "invalid_media",
    )
    assert PART in caught.value.message
    good = image_file(500, 400, "JPEG")
    verdict = await checker.verdict(good, content_hash(good))
    assert verdict.facts == ImageFacts(500, 400, "JPEG")
    assert 0 < verdict.peak_kb < 200 << 10  # the bombs would take gigabytes


async def test_checker_bomb_over_the_memory_limit_fails_alone() -> None:
    limits = CheckLimits(ImageLimits(pixels=1 << 30, side=1 << 20), limit_s=60.0, memory_mb=400)
    checker = MediaChecker(limits)
    try:
        bomb, good = png_bomb(16_000, 9_000), image_file(9, 8)
        results = await asyncio.gather(checker.check(bomb, PART), checker.check(good, PART), return_exceptions=True)
        assert isinstance(results[0], SluiceError)
        assert "memory" in results[0].message
        assert results[1] == ImageFacts(9, 8, "PNG")
    finally:
        await checker.close()


async def test_checker_slow_file_fails_alone_after_the_limit() -> None:
    limits = CheckLimits(ImageLimits(pixels=1 << 30, side=1 << 20), limit_s=0.2, memory_mb=4096)
    checker = MediaChecker(limits)
    try:
        bomb, good = png_bomb(20_000, 12_000), image_file(9, 8)
        with pytest.raises(SluiceError, match="too long"):
            await checker.check(bomb, PART)
        for _ in range(50):  # on a busy machine, the next process may also need several attempts
            verdict = await checker.verdict(good, content_hash(good))
            if verdict.facts is not None:
                break
        assert verdict.facts == ImageFacts(9, 8, "PNG")
    finally:
        await checker.close()


async def test_checker_killed_process_is_replaced(checker: MediaChecker) -> None:
    await checker.check(image_file(5, 5), PART)
    child = checker._checks.lanes[0].child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    assert await checker.check(image_file(6, 5), PART) == ImageFacts(6, 5, "PNG")


async def test_checker_process_yields_the_processor_to_the_service(checker: MediaChecker) -> None:
    await checker.check(image_file(5, 5), PART)
    child = checker._checks.lanes[0].child
    assert child is not None
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == min(mine + NICENESS, 19)


async def test_checker_same_content_is_decoded_once(checker: MediaChecker) -> None:
    file = image_file(300, 300)
    await asyncio.gather(*(checker.check(file, PART) for _ in range(8)))
    await checker.check(file, PART)
    assert checker.counts.checked == 1
    assert checker.counts.known >= 1


async def test_checker_with_too_many_waiting_files_refuses_more() -> None:
    checker = MediaChecker(CheckLimits(waiting=2))
    try:
        files = [image_file(side, 3) for side in range(1, 6)]
        results = await asyncio.gather(*(checker.check(file, PART) for file in files), return_exceptions=True)
        refused = [error for error in results if isinstance(error, SluiceError)]
        assert [error.kind for error in refused] == [ErrorKind.OVERLOADED] * 3
    finally:
        await checker.close()


async def test_checker_files_that_no_request_waits_for_are_not_decoded() -> None:
    checker = MediaChecker(CheckLimits(waiting=4))
    try:
        held = asyncio.Event()
        fork = checker._checks.server.fork

        async def late_fork() -> object:
            await held.wait()
            return await fork()

        checker._checks.server.fork = late_fork  # type: ignore[method-assign, assignment]
        files = [image_file(side, 3) for side in range(1, 5)]
        given_up = [asyncio.ensure_future(checker.check(file, PART)) for file in (*files, files[0])]
        await until(lambda: checker._checks.lanes[0].outstanding == 4)
        given_up.pop()
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        assert checker._checks.lanes[0].outstanding == 1, "the one for which a second request waits"
        checks = [asyncio.ensure_future(checker.check(file, PART)) for file in (files[1], image_file(9, 3))]
        await asyncio.sleep(0)
        held.set()
        assert await asyncio.gather(*checks) == [ImageFacts(2, 3, "PNG"), ImageFacts(9, 3, "PNG")]
        assert checker.counts.checked == 3, "these two, and the one for which a second request waits"
    finally:
        await checker.close()


async def test_loader_file_that_waits_for_others_too_long_is_overload() -> None:
    checker = MediaChecker()
    checker._checks.server.fork = asyncio.Event().wait  # type: ignore[method-assign, assignment]
    fetcher = MediaFetcher(AllowedHosts([]), HttpsGet(PublicAddresses(), 1000, 5.0), FetchLimits())
    loader = MediaLoader(fetcher, checker, MediaChecker(group=CLIPS), MediaLimits(), limit_s=0.2)
    try:
        with pytest.raises(SluiceError) as caught:
            await loader.load([MediaInput(PART, MediaKind.IMAGE, image_file(8, 8))])
        assert caught.value.kind is ErrorKind.OVERLOADED
        assert not checker._running
    finally:
        await loader.close()


async def test_loader_without_the_extension_for_clips_refuses_them_with_the_reason() -> None:
    fetcher = MediaFetcher(AllowedHosts([]), HttpsGet(PublicAddresses(), 1000, 5.0), FetchLimits())
    loader = MediaLoader(fetcher, MediaChecker(), None, MediaLimits(), no_clips="The extension is not installed.")
    try:
        with pytest.raises(SluiceError) as caught:
            await loader.load([MediaInput(PART, MediaKind.AUDIO, b"RIFF")])
        assert (caught.value.kind, caught.value.code) == (ErrorKind.INVALID_ARGUMENT, "media_not_supported")
        assert caught.value.message.endswith("preprocess cannot read. The extension is not installed.")
        assert len((await loader.load([MediaInput(PART, MediaKind.IMAGE, image_file(8, 8))])).items) == 1
    finally:
        await loader.close()


async def test_loader_of_many_fetched_bytes_refuses_more_until_others_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = image_file(8, 8)
    monkeypatch.setattr(loading, "MAX_FETCHED_BYTES", 2 * len(file) + 1)
    held, checker = asyncio.Event(), MediaChecker()
    fork = checker._checks.server.fork

    async def late_fork() -> object:
        await held.wait()
        return await fork()

    async def fetch(url: str, part: str) -> bytes:
        return file

    checker._checks.server.fork = late_fork  # type: ignore[method-assign, assignment]
    fetcher = MediaFetcher(AllowedHosts([]), HttpsGet(PublicAddresses(), 1000, 5.0), FetchLimits())
    fetcher.fetch = fetch  # type: ignore[method-assign]
    loader = MediaLoader(fetcher, checker, MediaChecker(group=CLIPS), MediaLimits())
    given = MediaInput(PART, MediaKind.IMAGE, url="https://a.test/1")
    try:
        first = [asyncio.ensure_future(loader.load([given] * 3)) for _ in range(2)]  # each file counts once a request
        await until(lambda: loader._fetched_bytes == 2 * len(file))
        with pytest.raises(SluiceError) as caught:
            await loader.load([given])
        assert caught.value.kind is ErrorKind.OVERLOADED
        held.set()
        assert [len(found.items) for found in await asyncio.gather(*first)] == [3, 3]
        assert loader._fetched_bytes == 0
        assert len((await loader.load([given])).items) == 1
    finally:
        await loader.close()
