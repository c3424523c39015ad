"""Files of audio and videos, good and bad, by the functions and by the real limited process."""

from __future__ import annotations

import random
import struct
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any

import av
import pytest
import soundfile

from services.common.base.errors import ErrorKind, SluiceError
from services.common.types.media.facts import AudioFacts, BadMedia, ImageFacts, VideoFacts, facts_form, read_facts
from services.common.types.media.spans import MediaKind, content_hash
from services.preprocess.media.checking import MediaChecker
from services.preprocess.media.child import CLIPS
from services.preprocess.media.clips import files as clips
from services.preprocess.media.clips.files import check_clip
from services.preprocess.media.limits import CheckLimits, ClipLimits
from services.preprocess.media.samples import sample_avi, sample_wav
from tests.support.data.clips import audio_file, timed_video, video_file
from tests.support.data.images import image_file

PART = "messages[2].content[1]"
LIMITS = CheckLimits(clips=ClipLimits(seconds=60, pixels=640 * 480, frames=300), limit_s=20.0, memory_mb=768)
AUDIO = ["WAV", "FLAC", "OGG", "MP3"]
VIDEO = ["MP4", "WEBM"]


@pytest.fixture
async def checker() -> AsyncIterator[MediaChecker]:
    checker = MediaChecker(LIMITS, CLIPS)
    yield checker
    await checker.close()


def wav_declaring(channels: int, rate: int, data: bytes = bytes(64)) -> bytes:
    """Returns a WAV file with any header."""
    head = struct.pack("<HHIIHH", 1, channels, rate, 2 * channels * rate, 2 * channels, 16)
    body = b"WAVEfmt " + struct.pack("<I", 16) + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def flac_of_silence(seconds: int, channels: int = 2) -> bytes:
    """Returns a FLAC file of a few bytes a second."""
    file = BytesIO()
    with soundfile.SoundFile(file, "w", 48_000, channels, format="FLAC") as written:
        for _ in range(seconds):
            written.buffer_write(bytes(2 * channels * 48_000), "int16")
    return file.getvalue()


def flac_without_length() -> bytes:
    """Returns a FLAC file that leaves out the number of its samples, as encoders of streams do."""
    file = bytearray(audio_file(0.5, "FLAC"))
    file[21] &= 0xF0
    file[22:26] = bytes(4)
    return bytes(file)


def wav_of_gsm() -> bytes:
    """Returns a WAV file in an encoding of telephones."""
    file = BytesIO()
    with soundfile.SoundFile(file, "w", 8_000, 1, format="WAV", subtype="GSM610") as written:
        written.buffer_write(bytes(16_000), "int16")
    return file.getvalue()


def mp3_declaring(frames: int) -> bytes:
    """Returns an MP3 file with any number of frames in its first one."""
    file = bytearray(audio_file(1.0, "MP3"))
    at = max(file.find(b"Info"), file.find(b"Xing")) + 8
    file[at : at + 4] = struct.pack(">I", frames)
    return bytes(file)


def video_declaring(frames: int) -> bytes:
    """Returns an MP4 file of seven frames whose table of times has any number of them."""
    file = bytearray(video_file(64, 48, 7))
    at = file.index(b"stts") + 12
    assert struct.unpack_from(">I", file, at) == (7,)
    struct.pack_into(">I", file, at, frames)
    return bytes(file)


def video_of_unknown_codec() -> bytes:
    """Returns an MP4 file whose codec has a name that is not assigned."""
    return video_file(64, 48, 7).replace(b"avc1", b"zzzz")


def video_without_pictures() -> bytes:
    """Returns an MP4 file with a track of audio only."""
    file = BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=16_000)
        frame = av.AudioFrame("fltp", "mono", 1024)
        frame.planes[0].update(bytes(4096))
        frame.rate, frame.pts = 16_000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("form", AUDIO)
@pytest.mark.parametrize(("rate", "channels"), [(8_000, 1), (16_000, 2), (44_100, 2), (48_000, 1)])
def test_check_clip_of_audio_returns_its_samples(form: str, rate: int, channels: int) -> None:
    facts = check_clip(audio_file(1.25, form, rate, channels), LIMITS.clips)
    assert facts == AudioFacts(round(1.25 * rate), rate, form)
    assert facts.media_type == {"MP3": "audio/mpeg"}.get(form, f"audio/{form.lower()}")


@pytest.mark.parametrize("form", VIDEO)
@pytest.mark.parametrize(("width", "height", "frames", "rate"), [(64, 48, 1, 10), (48, 64, 7, 25), (320, 240, 40, 30)])
def test_check_clip_of_a_video_returns_size_and_frames(
    form: str, width: int, height: int, frames: int, rate: int
) -> None:
    facts = check_clip(video_file(width, height, frames, form, rate), LIMITS.clips)
    assert facts == VideoFacts(width, height, frames, rate, form)


def test_check_clip_of_a_video_of_frames_out_of_order_decodes_a_bounded_number_of_pixels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = timed_video(range(0, 2_000, 100), group=12)  # the decoder returns its first frame after more than one packet
    assert check_clip(file, LIMITS.clips).kind is MediaKind.VIDEO
    monkeypatch.setattr(clips, "_MAX_DECODED_PIXELS", 64 * 48)
    with pytest.raises(BadMedia, match="no picture that can be decoded"):
        check_clip(file, LIMITS.clips)


@pytest.mark.parametrize("form", ["WAV", "FLAC", "MP4"])
@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9])
def test_check_clip_truncated_raises(form: str, kept: float) -> None:
    whole = video_file(64, 48, 30) if form == "MP4" else audio_file(1.0, form)
    with pytest.raises(BadMedia):
        check_clip(whole[: int(len(whole) * kept)], LIMITS.clips)


@pytest.mark.parametrize("form", [*AUDIO, *VIDEO])
def test_check_clip_of_the_first_bytes_alone_raises(form: str) -> None:
    whole = video_file(64, 48, 9, form) if form in VIDEO else audio_file(1.0, form)
    for kept in (4, 12, 40):
        with pytest.raises(BadMedia):
            check_clip(whole[:kept], LIMITS.clips)


def test_check_clip_of_an_mp3_cut_short_returns_the_samples_that_are_there() -> None:
    whole = audio_file(3.0, "MP3", 44_100)
    facts = check_clip(whole[: len(whole) // 2], LIMITS.clips)
    assert isinstance(facts, AudioFacts)
    assert 44_100 < facts.samples < 2 * 44_100


BAD_FILES = {
    "text": (b"not a clip at all", "formats"),
    "an image": (image_file(8, 8), "formats"),
    "playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "formats"),
    "concatenation": (b"ffconcat version 1.0\nfile '/etc/passwd'\n", "formats"),
    "avi": (sample_avi(64, 48, 4), "formats"),
    "no samples": (sample_wav(0), "no samples"),
    "no rate": (wav_declaring(1, 0), "samples a second|broken"),
    "high rate": (wav_declaring(1, 3_000_000_000 // 2), "samples a second|broken"),
    "channels": (wav_declaring(64, 16_000), "channels"),
    "rf64": (b"RF64" + wav_declaring(1, 16_000)[4:], "formats"),
    "gsm": (wav_of_gsm(), "the encoding GSM610, which engines do not read"),
    "no length": (flac_without_length(), "60 seconds, or no length"),
    "length of an mp3": (mp3_declaring(0x7FFF_FFFF), "60 seconds, or no length"),
    "long silence": (flac_of_silence(90), "60 seconds"),
    "samples of many channels": (flac_of_silence(16, channels=8), "5,760,000 samples of all channels"),
    "header of an mp3": (b"ID3" + bytes(100), "broken|no samples"),
    "long video": (video_file(64, 48, 65, rate=1), "60 seconds"),
    "frames": (video_file(64, 48, 301, rate=60), "300 frames"),
    "declared frames of a video": (video_declaring(0x7FFF_FFFF), "declares more than 300 frames"),
    "codec of a video": (video_of_unknown_codec(), "is not encoded by one of"),
    "pixels": (video_file(642, 480, 2), "307,200 pixels"),
    "no pictures": (video_without_pictures(), "no pictures"),
}


@pytest.mark.parametrize("name", BAD_FILES)
async def test_checker_bad_clip_is_refused_by_name_within_bounded_memory(checker: MediaChecker, name: str) -> None:
    file, reason = BAD_FILES[name]
    kind = MediaKind.VIDEO if "video" in name or name == "frames" else MediaKind.AUDIO
    with pytest.raises(SluiceError, match=reason) as caught:
        await checker.check(file, PART, kind=kind)
    assert (caught.value.kind, caught.value.param, caught.value.code) == (
        ErrorKind.INVALID_ARGUMENT,
        PART,
        "invalid_media",
    )
    assert caught.value.message.startswith(f"The {kind.capability} of {PART} ")
    good = audio_file(2.0, "OGG")
    verdict = await checker.verdict(good, content_hash(good))
    assert verdict.facts == AudioFacts(32_000, 16_000, "OGG")
    assert 0 < verdict.peak_kb < 200 << 10


@pytest.mark.parametrize(
    ("kind", "file", "found"),
    [
        (MediaKind.AUDIO, video_file(64, 48, 4), "video"),
        (MediaKind.VIDEO, audio_file(0.5), "audio"),
    ],
)
async def test_checker_file_of_another_kind_is_refused(
    checker: MediaChecker, kind: MediaKind, file: bytes, found: str
) -> None:
    with pytest.raises(SluiceError, match=f"is a file of the kind {found}"):
        await checker.check(file, PART, kind=kind)


async def test_checker_damaged_clips_are_refused_or_read_but_end_no_service(checker: MediaChecker) -> None:
    chance = random.Random(7)
    wholes = [audio_file(0.4, form) for form in AUDIO] + [video_file(64, 48, 8, form) for form in VIDEO]
    for whole in wholes:
        for _ in range(12):
            damaged = bytearray(whole)
            for _ in range(chance.randint(1, 30)):
                damaged[chance.randrange(4, len(damaged))] = chance.randrange(256)
            verdict = await checker.verdict(bytes(damaged), content_hash(bytes(damaged)))
            assert verdict.facts is not None or verdict.reason
            assert verdict.peak_kb < 400 << 10
    assert await checker.check(audio_file(0.3), PART, kind=MediaKind.AUDIO) == AudioFacts(4_800, 16_000, "WAV")


@pytest.mark.parametrize(
    "facts", [ImageFacts(3, 4, "PNG"), AudioFacts(5, 16_000, "OGG"), VideoFacts(3, 4, 9, 29.97, "MP4", 2)]
)
def test_facts_survive_their_form(facts: ImageFacts | AudioFacts | VideoFacts) -> None:
    assert read_facts(facts_form(facts)) == facts


@pytest.mark.parametrize(
    "form",
    [
        {"kind": "image", "width": 0, "height": 4, "format": "PNG"},
        {"kind": "image", "width": True, "height": 4, "format": "PNG"},
        {"kind": "image", "width": 3, "height": 4, "format": "MP4"},
        {"kind": "image", "width": 3, "height": 4, "format": "SVG"},
        {"kind": "image", "width": 3, "format": "PNG"},
        {"kind": "audio", "samples": 1.5, "rate": 16_000, "format": "WAV"},
        {"kind": "video", "width": 3, "height": 4, "frames": 2, "rate": float("nan"), "format": "MP4"},
        {"kind": "video", "width": 3, "height": 4, "frames": 2, "rate": 0.0, "format": "MP4"},
        {"kind": "video", "width": 3, "height": 4, "frames": 2, "rate": 1.0, "format": "MP4", "lost": -1},
        {"kind": "video", "width": 3, "height": 4, "frames": 2, "rate": 1.0, "format": "MP4", "lost": 2},
        {"kind": "text"},
        {},
    ],
)
def test_facts_of_a_lying_process_raise(form: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        read_facts(form)
