"""Bounds on media files."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Bounds on images.

    Attributes:
        pixels: most pixels of a frame.
        side: most pixels of a side.
        frames: most frames; only the first one is used.
    """

    pixels: int = 40_000_000
    side: int = 16_384
    frames: int = 256


@dataclass(frozen=True, slots=True)
class ClipLimits:
    """Bounds on audio and videos.

    Attributes:
        seconds: most seconds of a clip.
        pixels: most pixels of a frame of a video.
        frames: most frames of a video.
    """

    seconds: int = 600
    pixels: int = 8_912_896
    frames: int = 36_000

    @property
    def samples(self) -> int:
        """Most samples of all channels of a file of audio: those of stereo at 48 kHz."""
        return self.seconds * 2 * 48_000


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """Bounds on checking.

    Attributes:
        images: bounds on images.
        clips: bounds on audio and videos.
        limit_s: maximum seconds of one file.
        memory_mb: address space of a process, MiB.
        processes: number of processes.
        waiting: files that wait for one.
    """

    images: ImageLimits = field(default_factory=ImageLimits)
    clips: ClipLimits = field(default_factory=ClipLimits)
    limit_s: float = 5.0
    memory_mb: int = 768
    processes: int = 1
    waiting: int = 512
