"""Reads damaged files with vLLM's loaders in the worker's processes: JSON in and out.

In: {"files": [kind, base64], "good": number of the file that is read again last}. Out: {"results": of each file "read"
or the reason, "good": shape of the array of the good file before and after the others}.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from typing import Any

from services.common.base.errors import SluiceError
from services.common.types.media.spans import MediaKind
from services.worker.engines.vllm.clip_decoding import ClipDecoder, Unreadable
from services.worker.engines.vllm.media_files import DecodedBudget

OPTIONS: dict[MediaKind, dict[str, Any]] = {
    MediaKind.AUDIO: {},
    MediaKind.VIDEO: {"image": {}, "video": {"num_frames": 8}},
}


async def read(decoder: ClipDecoder, kind: str, text: str) -> Any:
    """The shape of a file's array, or why there is none."""
    try:
        array, _ = await decoder.decode(MediaKind[kind], base64.b64decode(text), DecodedBudget.full())
    except (Unreadable, SluiceError) as error:
        return str(error)
    return array.shape


async def run(question: dict[str, Any]) -> dict[str, Any]:
    decoder = ClipDecoder(OPTIONS)
    try:
        good = question["good"]
        before = await read(decoder, *good)
        results = await asyncio.gather(*(read(decoder, *file) for file in question["files"]))
        return {"results": results, "good": [before, await read(decoder, *good)]}
    finally:
        await decoder.close()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.load(sys.stdin)))))
