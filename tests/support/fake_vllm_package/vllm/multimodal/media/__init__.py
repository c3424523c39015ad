"""Stands in for vllm.multimodal.media: loaders whose files say how to misbehave."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class MediaWithBytes:
    media: Any
    original_bytes: bytes


def loaded(data: bytes) -> Any:
    """Returns the bytes of a file as an array, unless they are an order."""
    if data == b"crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if data == b"hang":
        time.sleep(600)
    if data == b"memory":
        return bytearray(1 << 44)
    if data == b"broken":
        raise OSError("no header.\nno more")
    if data == b"environment":
        raise OSError(" ".join(sorted(os.environ)))
    sys.stderr.write("a decoder's noise\n")
    return np.frombuffer(data, np.uint8)
