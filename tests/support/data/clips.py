"""Files of audio and videos for tests, good and bad."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import soundfile

CODECS = {"MP4": "libx264", "WEBM": "libvpx-vp9"}
MILLISECOND = Fraction(1, 1000)
_FIXED_POINT = 1 << 16
_MATRIX_AT = 44
"""Position of the matrix of a track, from the name of its header."""


def audio_file(seconds: float, form: str = "WAV", rate: int = 16_000, channels: int = 1, pitch: float = 440.0) -> bytes:
    """Returns an encoded tone of `round(seconds * rate)` samples in a format of libsndfile."""
    wave = (round(8_000 * math.sin(2 * math.pi * pitch * at / rate)) for at in range(round(seconds * rate)))
    samples = array("h", (value for value in wave for _ in range(channels)))
    file = BytesIO()
    with soundfile.SoundFile(file, "w", rate, channels, format=form) as written:
        written.buffer_write(samples.tobytes(), "int16")
    return file.getvalue()


def video_file(
    width: int,
    height: int,
    frames: int,
    form: str = "MP4",
    rate: int | Fraction = 10,
    color: tuple[int, int, int] = (200, 30, 60),
) -> bytes:
    """Returns an encoded video of one color, whose frames become darker."""
    file = BytesIO()
    with av.open(file, "w", format=form.lower()) as container:
        stream: Any = container.add_stream(CODECS[form], rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            shade = bytes(value * (frames - number) // frames for value in color)
            frame = av.VideoFrame(width, height, "rgb24")
            plane = frame.planes[0]
            plane.update((shade * width).ljust(plane.line_size, b"\0") * height)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def timed_video(
    times: Sequence[int],
    form: str = "MP4",
    group: int = 5,
    sound_s: float = 0.0,
    options: Mapping[str, str] | None = None,
    codec: str = "",
) -> bytes:
    """Returns an encoded video whose frames are shown at times in milliseconds.

    Args:
        group: frames from one key frame to the next.
        sound_s: length of a second track with sound.
        options: of the muxer.
        codec: another one than that of CODECS.
    """
    file = BytesIO()
    with av.open(file, "w", format=form.lower(), options=dict(options or {})) as container:
        stream: Any = container.add_stream(codec or CODECS[form], rate=10, options={"g": str(group)})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.time_base = MILLISECOND
        sound: Any = container.add_stream("libopus" if form == "WEBM" else "aac", rate=48_000) if sound_s else None
        for number, time in enumerate(times):
            frame = av.VideoFrame(64, 48, stream.pix_fmt)
            for plane in frame.planes:
                plane.update(bytes([number * 7 % 256]) * plane.buffer_size)
            frame.pts, frame.time_base = time, MILLISECOND
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if sound is not None:
            _add_silence(container, sound, sound_s)
    return file.getvalue()


def _add_silence(container: Any, stream: Any, seconds: float) -> None:
    samples, form = (1024, "fltp") if stream.codec_context.name == "aac" else (960, "s16")
    for number in range(math.ceil(seconds * 48_000 / samples)):
        frame = av.AudioFrame(form, "mono", samples)
        frame.planes[0].update(bytes(frame.planes[0].buffer_size))
        frame.rate, frame.pts = 48_000, number * samples
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def sideways(mp4: bytes) -> bytes:
    """Returns an MP4 file that is to be shown turned by 90 degrees, as phones write it."""
    at = mp4.index(b"tkhd") + _MATRIX_AT
    turn = struct.pack(">9i", 0, _FIXED_POINT, 0, -_FIXED_POINT, 0, 0, 0, 0, 1 << 30)
    return mp4[:at] + turn + mp4[at + len(turn) :]


def trimmed(mp4: bytes, start_ms: int) -> bytes:
    """Returns an MP4 file without the time before a start, cut without encoding: an edit list hides the rest."""
    file = BytesIO()
    options = {"avoid_negative_ts": "disabled"}
    with av.open(BytesIO(mp4), "r") as source, av.open(file, "w", format="mp4", options=options) as container:
        given = source.streams.video[0]
        stream = container.add_stream_from_template(given)
        assert given.time_base is not None
        offset = round(start_ms * MILLISECOND / given.time_base)
        source.seek(offset, stream=given)
        for packet in source.demux(given):
            if packet.size and packet.pts is not None and packet.dts is not None:
                packet.pts, packet.dts = packet.pts - offset, packet.dts - offset
                packet.stream = stream
                container.mux(packet)
    return file.getvalue()
