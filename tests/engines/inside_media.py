"""Runs an engine in this process through requests with images, one after the other: JSON in and out.

In: {"engine": "vllm", "argv": flags of the worker, "requests": [{"ids", "spans": [[offset, length, unexpanded ids]],
"files": [base64], "max_tokens"}]}. Out: {"capabilities", "answers": of each request its tokens, cached tokens, prompt
tokens and error}.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from array import array
from typing import Any

from services.common.media.spans import MediaFile, MediaKind, MediaSpan, content_hash
from services.worker.contract.engine import GenerateContext
from services.worker.contract.generation import GenerateRequest, MediaItem, SamplingParams, StopParams
from services.worker.engines.vllm import VllmEngine
from services.worker.settings import WorkerSettings


def item_of(span: list[Any], data: bytes) -> MediaItem:
    """One media item."""
    offset, length, short = span
    digest = content_hash(data)
    packed = array("I", short).tobytes()
    return MediaItem(MediaSpan(MediaKind.IMAGE, digest, offset, length, packed, length), MediaFile(digest, data))


async def ask(engine: VllmEngine, name: str, question: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request."""
    files = [base64.b64decode(text) for text in question["files"]]
    request = GenerateRequest(
        name,
        "tiny",
        array("I", question["ids"]),
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_tokens=question["max_tokens"], ignore_eos=True),
        media=tuple(map(item_of, question["spans"], files)),
    )
    answer: dict[str, Any] = {"tokens": [], "cached": 0, "prompt": 0, "error": ""}
    async for delta in engine.generate(request, GenerateContext(name)):
        answer["tokens"] += delta.token_ids
        if delta.cached_tokens is not None:
            answer["cached"] = delta.cached_tokens
        if delta.usage is not None:
            answer["prompt"] = delta.usage.prompt_tokens
        if delta.error is not None:
            answer["error"] = str(delta.error)
    return answer


async def run(question: dict[str, Any]) -> dict[str, Any]:
    """Every request in order."""
    engine = VllmEngine.from_args(WorkerSettings.load(question["argv"]))
    try:
        config = await engine.start("inside")
        answers = [await ask(engine, f"r{number}", asked) for number, asked in enumerate(question["requests"])]
        return {"capabilities": sorted(config.capabilities), "answers": answers}
    finally:
        await engine.cleanup()


def main() -> None:
    """Reads the question from standard input."""
    print(json.dumps(asyncio.run(run(json.load(sys.stdin)))))


if __name__ == "__main__":
    main()
