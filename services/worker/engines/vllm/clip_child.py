"""The processes in which vLLM's loaders read audio and videos, because a file can end the process that reads it.

The fork server imports vLLM's loaders once and reads no file. Its arguments are the descriptor of its control socket,
the options of the loaders, and the limits of a fork. Each fork lowers its own limits, and has no descriptors but its
connection. A request is `REQUEST` and a file; a reply is a status, `HEADER`, JSON of that length, and the bytes of an
array.
"""

from __future__ import annotations

import gc
import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from services.common.base.errors import SluiceError
from services.common.child_rpc.child import ChildLimits, ForkedService, serve_forks
from services.common.types.media.spans import MediaKind
from services.worker.engines.vllm import library
from services.worker.engines.vllm.media_files import DecodedBudget, Load, load_of

REQUEST = struct.Struct("<BQQ")
"""The kind, and the most bytes that the items of the prompt, and this one, may decode to."""
HEADER = struct.Struct("<I")
DECODED, FAILED, REFUSED, EXHAUSTED = b"d", b"f", b"r", b"x"
"""Statuses: an array, a file that cannot be read, one over the budget, and one after which the process ends."""


def answer(loads: Mapping[MediaKind, Load], request: bytes) -> bytes:
    """Returns the reply to one request."""
    kind, most, left = REQUEST.unpack_from(request)
    try:
        decoded = loads[MediaKind(kind)](request[REQUEST.size :], DecodedBudget(most, left))
    except SluiceError as error:
        return _reply(REFUSED, error.message)
    except MemoryError:
        return _reply(EXHAUSTED, "it requires too much memory")
    except Exception as error:  # decoders raise many types for broken files
        return _reply(FAILED, library.first_line(error))
    array, facts = decoded if MediaKind(kind) is MediaKind.AUDIO else decoded.media
    array = np.ascontiguousarray(array)
    return _reply(DECODED, {"type": array.dtype.str, "shape": array.shape, "facts": facts}, array.tobytes())


def _reply(status: bytes, header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header, default=lambda value: value.item()).encode()  # numbers of numpy
    return b"".join((status, HEADER.pack(len(text)), text, data))


class ClipService(ForkedService):
    """Reads files.

    Args:
        loads: reads a file of each kind.
        limits: of a fork.
    """

    def __init__(self, loads: Mapping[MediaKind, Load], limits: ChildLimits) -> None:
        super().__init__(limits)
        self._loads = loads

    def handle(self, request: bytes) -> bytes:
        return answer(self._loads, request)

    def is_last(self, reply: bytes) -> bool:
        return reply.startswith(EXHAUSTED)


def main(arguments: Sequence[str]) -> None:
    """Runs the fork server."""
    control_fd, options, limits = arguments
    chosen: dict[str, Any] = json.loads(options)
    loads = {MediaKind(int(kind)): load_of(MediaKind(int(kind)), given) for kind, given in chosen.items()}
    gc.collect()
    gc.freeze()
    serve_forks(socket.socket(fileno=int(control_fd)), ClipService(loads, ChildLimits.read(limits)))
