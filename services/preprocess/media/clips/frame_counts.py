"""Counts the frames of a video as engines do, which sample it by this number.

vLLM takes OpenCV's number, which is what the container declares or an estimate by the length, and corrects it by a seek
to the end, after which OpenCV reports a position. The seek is repeated here with the packets alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import av

_FIRST_STEP_BACK = 16
"""Frames before the end where OpenCV looks for a key frame first; half as many more each time it finds none."""


@dataclass(frozen=True, slots=True)
class FrameCount:
    """The frames of a video.

    Attributes:
        frames: what engines take for the number of frames; less than 1 if the container declares no length.
        lost: those of them that are not there.
    """

    frames: int
    lost: int


def declared_frames(container: Any, stream: Any, rate: float) -> int:
    """Returns the number of frames that the container declares, or of the length that it declares; 0 for neither.

    Args:
        rate: frames a second.
    """
    return stream.frames or int((container.duration or 0) / av.time_base * rate + 0.5)


def count_frames(container: Any, stream: Any, rate: float, shown: int) -> FrameCount:
    """Returns the number of frames; may raise FFmpeg's errors, and moves the position of the container.

    Args:
        rate: frames a second.
        shown: number of packets that an edit list does not hide.
    """
    declared = declared_frames(container, stream, rate)
    last = _position_at_end(container, stream, rate, declared) if declared > 1 else 0
    frames = last if 0 < last < declared - 1 else declared
    return FrameCount(frames, max(0, frames - max(1, shown)))


def _position_at_end(container: Any, stream: Any, rate: float, declared: int) -> int:
    """Returns the position after a seek to the end; 0 if that is in the middle of the video."""
    step_back = _FIRST_STEP_BACK
    while True:
        target = max(declared - step_back, 0)
        times = _times_after(container, stream, target / rate)
        number = int(rate * times[0] + 0.5) if times else -1
        if 0 <= number < declared:
            number += len(times)
            return number if number <= declared else 0
        if not target:
            return number + 1 if len(times) == 1 else 0
        step_back += step_back // 2


def _times_after(container: Any, stream: Any, seconds: float) -> list[float]:
    """Returns when the frames after the nearest key frame before a time are shown, in order."""
    start, base = stream.start_time or 0, float(stream.time_base)
    container.seek(start + int(seconds / base + 0.5), stream=stream, backward=True)
    packets = (packet for packet in container.demux(stream) if packet.size and not packet.is_discard)
    return sorted((packet.pts - start) * base for packet in packets if packet.pts is not None)
