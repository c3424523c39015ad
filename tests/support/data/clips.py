"""Files of audio and videos for tests, good and bad."""

from __future__ import annotations

import math
from array import array
from fractions import Fraction
from io import BytesIO

import av
import soundfile

CODECS = {"MP4": "libx264", "WEBM": "libvpx-vp9"}


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
        stream = container.add_stream(CODECS[form], rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"  # type: ignore[attr-defined]
        for number in range(frames):
            shade = bytes(value * (frames - number) // frames for value in color)
            frame = av.VideoFrame(width, height, "rgb24")
            plane = frame.planes[0]
            plane.update((shade * width).ljust(plane.line_size, b"\0") * height)
            container.mux(stream.encode(frame))  # type: ignore[attr-defined]
        container.mux(stream.encode(None))  # type: ignore[attr-defined]
    return file.getvalue()
