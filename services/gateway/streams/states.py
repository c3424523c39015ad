"""The states of a stream, and which component moves it from one to the next.

A stream has two states: of its engine, which makes tokens, and of its text, which a postprocess replica makes of them.

    STARTING ──► RUNNING                                              one worker
    STARTING ──► PREFILLING ──► DECODING                              the two workers of a pair
    PREFILLING, DECODING ──► RUNNING                                  the decode worker alone
    RUNNING, PREFILLING, DECODING ──► MOVING ──► RUNNING, PREFILLING
    RUNNING, PREFILLING, DECODING ──► ENGINE_DONE
    every state ──► ENDED

- `StreamManager` starts a stream on a worker or on a pair, and resumes it there after a migration.
- `StreamRecovery` passes it from the prefill worker of its pair to the decode worker (DECODING) or, if the pair fails,
  lets the decode worker run it alone (RUNNING).
- `Migrator` suspends it when its worker is lost (MOVING), and resumes it on others.
- `LinkEvents` notes the end of the engine: reported by the worker, or known from the tokens of a worker that was lost.
- `RunningStreams` ends it, from any state and once: with a finish, an error, or because its client has left.

A stream has a worker in RUNNING, PREFILLING and DECODING, and in no other state. Its reservation is released when it
moves or ends.

    DEFERRED ──► ENGINE
    DEFERRED ──► OPEN, WAITING
    WAITING ◄──► OPEN
    every state ──► CLOSED

`PostprocessPool` moves it here: to OPEN on a replica or a custom stage, to WAITING while no replica is available, and
back to OPEN on the next one when a replica is lost or drains.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum, auto


class StreamState(IntEnum):  # which hashes without a call in Python
    """What makes the tokens of a stream."""

    STARTING = auto()  # none yet
    RUNNING = auto()  # one worker, from prompt to end
    PREFILLING = auto()  # the prefill worker of its pair
    DECODING = auto()  # the decode worker of its pair
    MOVING = auto()  # none; a migration looks for another worker
    ENGINE_DONE = auto()  # none; the rest of its text, or its error, is due
    ENDED = auto()  # none; its sink has received the end


class TextState(Enum):
    """What makes the text of a stream."""

    DEFERRED = auto()  # none until the worker has sent the token ids of the prompt
    ENGINE = auto()  # its engine
    WAITING = auto()  # none until a replica is available
    OPEN = auto()  # a postprocess replica or a custom stage
    CLOSED = auto()  # the stream has ended


_LOST = {StreamState.MOVING, StreamState.ENGINE_DONE, StreamState.ENDED}
_NEXT: Mapping[StreamState, set[StreamState]] = {
    StreamState.STARTING: {StreamState.RUNNING, StreamState.PREFILLING, StreamState.ENDED},
    StreamState.RUNNING: _LOST,
    StreamState.PREFILLING: {StreamState.DECODING, StreamState.RUNNING, *_LOST},
    StreamState.DECODING: {StreamState.RUNNING, *_LOST},
    StreamState.MOVING: {StreamState.RUNNING, StreamState.PREFILLING, StreamState.ENDED},
    StreamState.ENGINE_DONE: {StreamState.ENDED},
    StreamState.ENDED: set(),
}


class IllegalTransitionError(RuntimeError):
    """A stream was to move between two states that do not follow each other."""


def checked(before: StreamState, after: StreamState) -> StreamState:
    """Returns the next state of a stream; raises IllegalTransitionError if it cannot follow."""
    if after not in _NEXT[before]:
        raise IllegalTransitionError(f"A stream cannot go from {before.name} to {after.name}.")
    return after
