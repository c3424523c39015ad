"""The processes that check media files.

``python -m services.preprocess.media.child images FD LIMITS PIXELS SIDE FRAMES`` checks images,
``python -m services.preprocess.media.child clips FD LIMITS SECONDS PIXELS FRAMES`` audio and videos.
The fork server loads the libraries once and reads no file. Each fork lowers its own limits, has an empty
environment and no descriptors but its connection. A request is a file; a reply is JSON.
"""

from __future__ import annotations

import gc
import resource
import socket
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module

import orjson

from services.common.child_rpc.child import ChildLimits, ForkedService, serve_forks
from services.common.packages.extensions import MEDIA, find_extension
from services.common.types.media.facts import BadMedia, MediaFacts, facts_form
from services.preprocess.media.limits import ClipLimits

Check = Callable[[bytes], MediaFacts]
"""Returns the facts of a file; raises BadMedia."""

IMAGES, CLIPS = "images", "clips"
ENDS = b'{"ends":'
"""Beginning of a reply after which the process ends."""
OUT_OF_MEMORY = ENDS + b"true}"


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
        limits: of a fork.
    """

    def __init__(self, check: Check, limits: ChildLimits) -> None:
        super().__init__(limits)
        self._check = check

    def handle(self, request: bytes) -> bytes:
        return answer(self._check, request)

    def is_last(self, reply: bytes) -> bool:
        return reply.startswith(ENDS)


def main(group: str, control_fd: str, limits: str, *numbers: str) -> None:
    """Runs the fork server."""
    check = load_check(group, tuple(map(int, numbers)))
    gc.collect()
    gc.freeze()
    serve_forks(socket.socket(fileno=int(control_fd)), MediaCheckService(check, ChildLimits.read(limits)))


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
