"""Checks files of audio and videos; runs in a process with limits, because files may be made to exhaust their readers.

Audio is decoded completely, by libsndfile. Of a video, all packets are read and the first frame is decoded, by FFmpeg:
an engine only looks at a few of the others.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

import av
import soundfile

from services.common.types.media.facts import UNKNOWN_FORMAT, AudioFacts, BadMedia, MediaFacts, VideoFacts
from services.preprocess.media.clips.containers import ends_early
from services.preprocess.media.clips.frame_counts import count_frames, declared_frames
from services.preprocess.media.limits import ClipLimits

READ_SAMPLES = 1 << 16
MAX_CHANNELS = 8
"""Channels of an audio file; a file with more is refused with INVALID_ARGUMENT."""
RATES = range(1_000, 384_001)
_READERS = {"WAV": ("WAV", "WAVEX"), "MP3": ("MP3",), "FLAC": ("FLAC",), "OGG": ("OGG",)}
"""Names of the formats in libsndfile."""
_DEMUXERS = {"MP4": "mp4", "WEBM": "webm"}
_CODECS = frozenset(("h264", "hevc", "mpeg4", "vp8", "vp9"))
MAX_STREAMS = 64
"""Tracks of a video; a file with more is refused with INVALID_ARGUMENT."""
_MAX_READ_STREAMS = 256
"""Tracks of a video that FFmpeg reads, as each takes memory; with more the file is refused without their number."""
_MAX_DECODED = 256
"""Packets decoded to find the first frame, as encoders write a few dozen in another order; then the file is refused."""
_MAX_DECODED_PIXELS = _MAX_DECODED * 1920 * 1080
"""Pixels of these packets, so that fewer are decoded of frames larger than full HD; then the file is refused."""
_SIDEWAYS = 90
"""Degrees; videos of phones are recorded so."""
_MP3_SYNC = 0xFFE0


def sniff(data: bytes) -> str:
    """Returns the format that the first bytes of a file declare; empty for others than those of audio and video."""
    if data.startswith(b"RIFF") and data[8:12] == b"WAVE":
        return "WAV"
    if data.startswith(b"fLaC"):
        return "FLAC"
    if data.startswith(b"OggS"):
        return "OGG"
    if data[4:8] == b"ftyp":
        return "MP4"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "WEBM"
    if data.startswith(b"ID3") or int.from_bytes(data[:2], "big") & _MP3_SYNC == _MP3_SYNC:
        return "MP3"
    return ""


def check_clip(data: bytes, limits: ClipLimits) -> MediaFacts:
    """Returns the facts of a file of audio or of a video; raises BadMedia."""
    form = sniff(data)
    if not form:
        raise BadMedia(UNKNOWN_FORMAT)
    return check_video(data, form, limits) if form in _DEMUXERS else check_audio(data, form, limits)


def check_audio(data: bytes, form: str, limits: ClipLimits) -> AudioFacts:
    """Decodes a file of audio and returns its facts; raises BadMedia."""
    if form == "WAV" and 0xFFFFFFFF > int.from_bytes(data[4:8], "little") > len(data) - 8:
        raise BadMedia("is truncated")
    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            _check_header(file, form, limits)
            samples, rate = _count_samples(file, limits), file.samplerate
            if form == "FLAC" and samples < file.frames:
                raise BadMedia("is truncated")
    except (soundfile.SoundFileError, ValueError, TypeError, OSError) as error:
        raise BadMedia("is broken or truncated") from error
    if not samples:
        raise BadMedia("has no samples")
    return AudioFacts(samples, rate, form)


def _check_header(file: Any, form: str, limits: ClipLimits) -> None:
    if file.format not in _READERS[form]:
        raise BadMedia(UNKNOWN_FORMAT)
    if file.channels > MAX_CHANNELS:
        raise BadMedia(f"has more than {MAX_CHANNELS} channels")
    if file.samplerate not in RATES:
        raise BadMedia(f"has not between {RATES[0]:,} and {RATES[-1]:,} samples a second")
    if not file.seekable():
        raise BadMedia(f"has the encoding {file.subtype}, which engines do not read")
    if file.frames > limits.seconds * file.samplerate:
        raise BadMedia(f"declares more than {limits.seconds:,} seconds, or no length")
    if file.frames * file.channels > limits.samples:
        raise BadMedia(f"declares more than {limits.samples:,} samples of all channels")


def _count_samples(file: Any, limits: ClipLimits) -> int:
    """Returns the number of samples that are really there; headers may declare more."""
    samples = 0
    buffer = bytearray(4 * file.channels * READ_SAMPLES)
    while read := file.buffer_read_into(buffer, "float32"):
        samples += read
        if samples > limits.seconds * file.samplerate:
            raise BadMedia(f"has more than {limits.seconds:,} seconds")
        if samples * file.channels > limits.samples:
            raise BadMedia(f"has more than {limits.samples:,} samples of all channels")
    return samples


def check_video(data: bytes, form: str, limits: ClipLimits) -> VideoFacts:
    """Reads the packets of a video, decodes its first frame and returns its facts; raises BadMedia."""
    if ends_early(data, form):
        raise BadMedia("is truncated")
    options = {"protocol_whitelist": "", "max_streams": str(_MAX_READ_STREAMS)}
    try:
        with av.open(BytesIO(data), format=_DEMUXERS[form], options=options) as container:
            if len(container.streams) > MAX_STREAMS:
                raise BadMedia(f"has more than {MAX_STREAMS} tracks")
            if not container.streams.video:
                raise BadMedia("has no pictures")
            stream = container.streams.video[0]
            codec: Any = stream.codec_context  # None for a codec that FFmpeg does not know
            if codec is None or codec.name.removeprefix("lib") not in _CODECS:
                raise BadMedia(f"is not encoded by one of {', '.join(sorted(_CODECS))}")
            codec.thread_count = 1
            _check_size(codec.width, codec.height, limits)
            return _read_packets(container, stream, form, limits)
    except (av.FFmpegError, ValueError, TypeError, OSError) as error:
        raise BadMedia("is broken or truncated") from error


def _read_packets(container: Any, stream: Any, form: str, limits: ClipLimits) -> VideoFacts:
    frames, shown, size = 0, 0, (0, 0)
    pixels = max(1, stream.codec_context.width * stream.codec_context.height)
    most_decoded = min(_MAX_DECODED, _MAX_DECODED_PIXELS // pixels)
    for packet in container.demux(stream):
        frames += packet.size > 0  # the last one is empty, and makes the decoder return what it holds
        shown += packet.size > 0 and not packet.is_discard  # an edit list hides the others
        if frames > limits.frames:
            raise BadMedia(f"has more than {limits.frames:,} frames")
        if not size[0] and frames <= most_decoded:
            size = _first_size(packet)
    _check_size(*size, limits)
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    if rate <= 0:
        raise BadMedia("has no rate of pictures")
    seconds = (container.duration or 0) / av.time_base
    if max(frames / rate, seconds) > limits.seconds:
        raise BadMedia(f"has more than {limits.seconds:,} seconds")
    if declared_frames(container, stream, rate) > limits.frames:  # which engines look for, however few there are
        raise BadMedia(f"declares more than {limits.frames:,} frames")
    count = count_frames(container, stream, rate, shown)
    if count.frames < 1:
        raise BadMedia("does not declare its length, which engines need; remux it")
    return VideoFacts(*size, count.frames, rate, form, count.lost)


def _first_size(packet: Any) -> tuple[int, int]:
    """Returns the size of the first frame of a packet as it is shown; zeros without one."""
    for frame in packet.decode():
        sideways = frame.rotation % 180 == _SIDEWAYS
        return (frame.height, frame.width) if sideways else (frame.width, frame.height)
    return 0, 0


def _check_size(width: int, height: int, limits: ClipLimits) -> None:
    if width < 1 or height < 1:
        raise BadMedia("has no picture that can be decoded")
    if width * height > limits.pixels:
        raise BadMedia(f"has frames of more than {limits.pixels:,} pixels")
