"""Numbers of frames as vLLM counts and takes them, and files that are cut.

The expected numbers are those of vLLM 0.32's own loader of the Qwen2-VL family, with OpenCV 5.0, for the same files.
"""

from __future__ import annotations

from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import pytest

from services.common.types.media.facts import BadMedia, VideoFacts
from services.preprocess.media.clips.containers import ends_early
from services.preprocess.media.clips.files import check_video
from services.preprocess.media.limits import ClipLimits
from services.preprocess.media.rules import sampled_frames
from tests.support.data.clips import sideways, timed_video, trimmed

LIMITS = ClipLimits()
EVEN = [100 * number for number in range(60)]
LATER = [2_000 + 33 * number for number in range(60)]
SLOWER = [4 * number * number for number in range(60)]
GAP = [33 * number + (3_000 if number > 25 else 0) for number in range(60)]
TWO_RATES = [33 * number if number < 30 else 1_000 + 100 * (number - 30) for number in range(60)]
RARE = [200 * number for number in range(60)]
FRAGMENTS = {"movflags": "frag_keyframe+empty_moov"}


def checked(data: bytes, form: str = "MP4") -> VideoFacts:
    return check_video(data, form, LIMITS)


def taken(facts: VideoFacts) -> tuple[int, int]:
    return facts.frames, sampled_frames(facts.frames, facts.rate, facts.lost)


@pytest.mark.parametrize(
    ("times", "mp4", "webm"),
    [
        (EVEN, (60, 12), (60, 12)),
        (LATER, (60, 4), (23, 4)),
        (SLOWER, (56, 24), (126, 12)),
        (GAP, (45, 6), (43, 8)),
        (TWO_RATES, (54, 6), (40, 8)),
        (RARE, (60, 22), (110, 12)),
        (EVEN[:4], (4, 4), (4, 4)),
    ],
    ids=["even", "later", "slower", "gap", "two_rates", "rare", "short"],
)
def test_check_video_with_uneven_times_counts_frames_as_vllm(
    times: list[int], mp4: tuple[int, int], webm: tuple[int, int]
) -> None:
    assert taken(checked(timed_video(times))) == mp4
    assert taken(checked(timed_video(times, "WEBM"), "WEBM")) == webm


@pytest.mark.parametrize("form", ["MP4", "WEBM"])
def test_check_video_with_longer_sound_counts_its_own_frames(form: str) -> None:
    assert taken(checked(timed_video(EVEN, form, sound_s=8.0), form)) == (60, 12)


def test_check_video_in_fragments_counts_all_frames() -> None:
    assert taken(checked(timed_video(EVEN, options=FRAGMENTS))) == (60, 12)
    assert taken(checked(timed_video(EVEN, sound_s=8.0, options=FRAGMENTS))) == (60, 12)


def test_check_video_one_frame_short_of_its_length_names_the_lost_one() -> None:
    facts = checked(timed_video(EVEN[:4], "WEBM", sound_s=0.5), "WEBM")
    assert (facts.frames, facts.lost) == (5, 1)
    assert taken(facts) == (5, 4)


@pytest.mark.parametrize("group", [5, 20, 60])
@pytest.mark.parametrize(("start", "expected"), [(1_000, (50, 10)), (2_300, (37, 6)), (3_950, (20, 4))])
def test_check_video_trimmed_by_an_edit_list_counts_what_is_shown(
    group: int, start: int, expected: tuple[int, int]
) -> None:
    assert taken(checked(trimmed(timed_video(EVEN, group=group), start))) == expected


def test_check_video_of_a_phone_held_upright_returns_its_size_as_shown() -> None:
    facts = checked(sideways(timed_video(EVEN)))
    assert (facts.width, facts.height) == (48, 64)


def test_check_video_without_a_length_raises() -> None:
    with pytest.raises(BadMedia, match="does not declare its length"):
        checked(timed_video(EVEN, "WEBM", options={"live": "1"}), "WEBM")


def test_check_video_of_another_codec_raises() -> None:
    with pytest.raises(BadMedia, match="is not encoded by one of h264, hevc, mpeg4, vp8, vp9"):
        checked(timed_video(EVEN, codec="mjpeg"))


@pytest.mark.parametrize(("form", "codec"), [("WEBM", "libvpx"), ("MP4", "mpeg4")])
@pytest.mark.parametrize(("tracks", "reason"), [(100, "has more than 64 tracks"), (300, "more than 64 tracks|broken")])
def test_check_video_with_many_tracks_raises(form: str, codec: str, tracks: int, reason: str) -> None:
    file = BytesIO()
    with av.open(file, "w", format=form.lower()) as container:
        streams: list[Any] = [container.add_stream(codec, rate=10) for _ in range(tracks)]
        for stream in streams:
            stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        for stream in streams:
            frame = av.VideoFrame(16, 16, "yuv420p")
            frame.pts, frame.time_base = 0, Fraction(1, 10)
            container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
    with pytest.raises(BadMedia, match=reason):
        checked(file.getvalue(), form)


@pytest.mark.parametrize("form", ["MP4", "WEBM"])
@pytest.mark.parametrize("options", [{}, FRAGMENTS], ids=["plain", "fragments"])
def test_ends_early_of_a_file_without_its_end_is_true(form: str, options: dict[str, str]) -> None:
    whole = timed_video(EVEN, form, options=options if form == "MP4" else {})
    assert not ends_early(whole, form)
    assert not ends_early(whole + b"tail", form)
    assert ends_early(whole[: len(whole) * 2 // 3], form)
    with pytest.raises(BadMedia, match="is truncated"):
        checked(whole[: len(whole) * 2 // 3], form)


@pytest.mark.parametrize("form", ["MP4", "WEBM"])
def test_ends_early_of_any_first_bytes_raises_no_error(form: str) -> None:
    whole = timed_video(EVEN[:3], form)
    for kept in range(60):
        assert ends_early(whole[:kept], form) in (True, False)
    assert not ends_early(b"\0\0\0\1mdat" + bytes(8), "MP4")
    assert ends_early(b"\0\0\0\1mdat" + b"\0" * 7 + b"\x40", "MP4")
    assert not ends_early(b"\0\0\0\0mdat" + bytes(8), "MP4")
