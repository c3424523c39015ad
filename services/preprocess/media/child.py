"""The processes that check media files.

``python -m services.preprocess.media.child images FD S MIB PIXELS SIDE FRAMES`` checks images,
``python -m services.preprocess.media.child clips FD S MIB SECONDS PIXELS FRAMES`` audio and videos.
The fork server loads the libraries once and reads no file. Each fork lowers its own limits, has an empty
environment and no descriptors but its connection. A request is a file; a reply is JSON.
"""

from __future__ import annotations

import gc
import os
import resource
import socket
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module

import orjson

from services.common.child_rpc.child import Channel, ForkedService, serve, serve_forks
from services.common.media.facts import BadMedia, MediaFacts, facts_form
from services.common.packages.extensions import MEDIA, find_extension
from services.preprocess.media.limits import ClipLimits

Check = Callable[[bytes], MediaFacts]
"""Returns the facts of a file; raises BadMedia."""

IMAGES, CLIPS = "images", "clips"
ENDS = b'{"ends":'
"""Beginning of a reply after which the process ends."""
OUT_OF_MEMORY = ENDS + b"true}"
ALARM_S = 2.0
NICENESS = 5
"""Added to that of the service: text goes first while all processors are busy."""
_FILES = 16


def answer(check: Check, request: bytes) -> bytes:
    """Returns the reply to one request."""
    try:
        facts = check(request)
    except BadMedia as error:
        return orjson.dumps({"error": str(error)})
    except MemoryError:
        return OUT_OF_MEMORY
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return orjson.dumps({"facts": facts_form(facts), "peak_kb": peak_kb})


class MediaCheckService(ForkedService):
    """Checks files.

    Args:
        check: checks one file.
        limit_s: maximum time of a file, seconds.
        memory_mb: address space of a fork, MiB.
    """

    def __init__(self, check: Check, limit_s: float, memory_mb: int) -> None:
        self._check = check
        self._limit_s = limit_s
        self._memory_mb = memory_mb

    def limit(self) -> None:
        os.nice(NICENESS)
        resource.setrlimit(resource.RLIMIT_AS, (self._memory_mb << 20,) * 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, _FILES))

    def serve(self, channel: Channel) -> None:
        handle = partial(answer, self._check)
        serve(channel, handle, self._limit_s + ALARM_S, lambda reply: reply.startswith(ENDS))


def main(group: str, control_fd: str, limit_s: str, memory_mb: str, *numbers: str) -> None:
    """Runs the fork server."""
    check = load_check(group, tuple(map(int, numbers)))
    gc.collect()
    gc.freeze()
    serve_forks(socket.socket(fileno=int(control_fd)), MediaCheckService(check, float(limit_s), int(memory_mb)))


def load_check(group: str, numbers: tuple[int, ...]) -> Check:
    """Returns the check of a group of kinds, with its limits; loads only the libraries of this group."""
    if group == IMAGES:
        images = import_module("services.preprocess.media.images")
        return partial(images.check_image, limits=images.ImageLimits(*numbers))
    extension = find_extension(MEDIA, CLIPS)
    assert extension is not None, "the service starts this process only with the extension"
    return partial(extension.load(), limits=ClipLimits(*numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
