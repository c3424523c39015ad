"""Divides what a WebSocket receives into slices whose parsing takes a bounded time, whatever the size of its frames."""

from __future__ import annotations

from collections.abc import Callable

MAX_SLICE_BYTES = 8 << 10
"""Bytes of a WebSocket that are parsed in one turn of the event loop; the rest waits for the next one."""
MAX_SLICE_FRAMES = 32
"""Frames of a WebSocket that begin in one turn of the event loop; the rest waits for the next one."""
MAX_FRAGMENTS = 1_024
"""Fragments of one message of a WebSocket; with more the connection is closed, budget `socket_frames`."""

PROTOCOL_ERROR, POLICY_VIOLATION = 1002, 1008

_FIN, _CONTROL, _OPCODE, _MASKED, _LENGTH = 0x80, 0x08, 0x0F, 0x80, 0x7F
_TWO_BYTES, _EIGHT_BYTES = 126, 127


class SocketViolation(Exception):
    """Frames that end their connection.

    Attributes:
        code: close code.
        reason: sentence for the close frame, at most 123 bytes.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class FrameSlicer:
    """Follows the headers of frames; the parser itself checks everything that is not counted here.

    Attributes:
        frames: frames that began in the last slice, of any kind.
        control_frames: those of them that are pings, pongs and closes.
    """

    def __init__(self) -> None:
        self.frames = self.control_frames = 0
        self._header = bytearray()
        self._payload_left = 0
        self._fragments = 0  # of the message in progress
        self._ends_message = False  # whether the frame in progress is the last one of its message

    def end_of_slice(self, data: bytes) -> int:
        """Returns how many bytes of `data` form the next slice, and counts its frames.

        A slice has at most `MAX_SLICE_BYTES` and the beginnings of `MAX_SLICE_FRAMES`, and ends with a message's end.

        Args:
            data: what follows the last slice; not empty.

        Raises:
            SocketViolation: the message has more than `MAX_FRAGMENTS`, or an empty one that is not its last.
        """
        position, end = 0, min(len(data), MAX_SLICE_BYTES)
        self.frames = self.control_frames = 0
        while position < end:
            if not self._payload_left:
                if self.frames == MAX_SLICE_FRAMES:
                    break
                position = self._read_header(data, position, end)
            step = min(self._payload_left, end - position)
            self._payload_left -= step
            position += step
            if self._ends_message and not self._payload_left:
                self._ends_message = False
                break
        return position

    def _read_header(self, data: bytes, start: int, end: int) -> int:
        """Reads up to the end of a frame's header; returns the position behind what it has read."""
        position = start
        while (missing := _header_size(self._header) - len(self._header)) and position < end:
            read = data[position : min(position + missing, end)]
            self._header += read
            position += len(read)
        if not missing:
            self._begin_frame(bytes(self._header))
            self._header.clear()
        return position

    def _begin_frame(self, header: bytes) -> None:
        self.frames += 1
        self._payload_left = _payload_size(header)
        if header[0] & _CONTROL:
            self.control_frames += 1
            return
        is_last = bool(header[0] & _FIN)
        if not self._payload_left and not is_last:
            raise SocketViolation(PROTOCOL_ERROR, "a fragment of a message is empty, and not its last")
        self._fragments += 1
        if self._fragments > MAX_FRAGMENTS:
            raise SocketViolation(POLICY_VIOLATION, f"a message has more than {MAX_FRAGMENTS} fragments")
        if is_last:
            self._fragments = 0
            self._ends_message = True


def _header_size(begun: bytearray) -> int:
    """Returns the size of a header in bytes, as far as its first bytes determine it."""
    if len(begun) < 2:
        return 2
    length = begun[1] & _LENGTH
    extended = 2 if length == _TWO_BYTES else 8 if length == _EIGHT_BYTES else 0
    return 2 + extended + (4 if begun[1] & _MASKED else 0)


def _payload_size(header: bytes) -> int:
    length = header[1] & _LENGTH
    if length < _TWO_BYTES:
        return length
    return int.from_bytes(header[2:4] if length == _TWO_BYTES else header[2:10], "big")


class Allowance:
    """How often something may happen: `burst` times at once, and `per_s` times a second in the long run.

    Args:
        clock: returns seconds.
    """

    def __init__(self, burst: int, per_s: float, clock: Callable[[], float]) -> None:
        self._burst = burst
        self._per_s = per_s
        self._clock = clock
        self._left: float = burst
        self._updated_at = clock()

    def take(self, count: int) -> bool:
        """Counts `count` occurrences; returns whether all of them are allowed."""
        now = self._clock()
        self._left = min(self._left + (now - self._updated_at) * self._per_s, self._burst) - count
        self._updated_at = now
        return self._left >= 0

    @property
    def wait_s(self) -> float:
        """Seconds until those taken so far are allowed."""
        return max(-self._left / self._per_s, 0.0)
