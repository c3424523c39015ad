"""The processes that check media files: ``python -m services.preprocess.media.child FD S MIB PIXELS SIDE FRAMES``.

The fork server loads the image library once and reads no file. Each fork lowers its own limits, has an empty
environment and no descriptors but its connection. A request is a file; a reply is JSON.
"""

from __future__ import annotations

import gc
import os
import resource
import socket
import sys
from functools import partial

import orjson

from services.common.child_rpc.child import Channel, ForkedService, serve, serve_forks
from services.preprocess.media.images import BadImage, ImageLimits, check_image

ENDS = b'{"ends":'
"""Beginning of a reply after which the process ends."""
OUT_OF_MEMORY = ENDS + b"true}"
ALARM_S = 2.0
NICENESS = 5
"""Added to that of the service: text goes first while all processors are busy."""
_FILES = 16


def answer(limits: ImageLimits, request: bytes) -> bytes:
    """Returns the reply to one request."""
    try:
        facts = check_image(request, limits)
    except BadImage as error:
        return orjson.dumps({"error": str(error)})
    except MemoryError:
        return OUT_OF_MEMORY
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return orjson.dumps({"width": facts.width, "height": facts.height, "format": facts.format, "peak_kb": peak_kb})


class MediaCheckService(ForkedService):
    """Checks files.

    Args:
        limit_s: maximum time of a file, seconds.
        memory_mb: address space of a fork, MiB.
    """

    def __init__(self, limit_s: float, memory_mb: int, limits: ImageLimits) -> None:
        self._limit_s = limit_s
        self._memory_mb = memory_mb
        self._limits = limits

    def limit(self) -> None:
        os.nice(NICENESS)
        resource.setrlimit(resource.RLIMIT_AS, (self._memory_mb << 20,) * 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, _FILES))

    def serve(self, channel: Channel) -> None:
        handle = partial(answer, self._limits)
        serve(channel, handle, self._limit_s + ALARM_S, lambda reply: reply.startswith(ENDS))


def main(control_fd: str, limit_s: str, memory_mb: str, pixels: str, side: str, frames: str) -> None:
    """Runs the fork server."""
    limits = ImageLimits(int(pixels), int(side), int(frames))
    gc.collect()
    gc.freeze()
    serve_forks(socket.socket(fileno=int(control_fd)), MediaCheckService(float(limit_s), int(memory_mb), limits))


if __name__ == "__main__":
    main(*sys.argv[1:])
