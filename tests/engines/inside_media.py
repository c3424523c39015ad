"""Runs an engine in this process through requests with media items, one after the other: JSON in and out.

In: {"engine": "vllm", "argv": flags of the worker, "requests": [{"ids", "spans": [[offset, length, unexpanded ids]],
"kinds": of each span, "image" if left out, "files": [base64], "max_tokens"}]}. Out: {"capabilities", "answers": of each
request its tokens, cached tokens, prompt tokens, error, and "stored": the number of blocks of its prompt, by the hashes
of all services, which the engine has reported}.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from array import array
from typing import Any

from services.common.types.hashing import block_hashes
from services.common.types.media.spans import MediaFile, MediaKind, MediaSpan, content_hash
from services.worker.contract.cache_events import BlocksStored, KvEvent
from services.worker.contract.engine import EngineConfig, GenerateContext
from services.worker.contract.generation import GenerateRequest, MediaItem, SamplingParams, StopParams
from services.worker.engines.vllm import VllmEngine
from services.worker.settings import WorkerSettings

EVENTS_S = 10.0


class Stored:
    """The hashes of blocks that an engine reports as stored."""

    def __init__(self, engine: VllmEngine) -> None:
        self.hashes: set[int] = set()
        for source in engine.kv_event_sources():
            source.subscribe(self._add)

    def _add(self, events: Any) -> None:
        event: KvEvent
        for event in events:
            if isinstance(event, BlocksStored):
                self.hashes.update(event.hashes)

    async def count(self, hashes: array[int]) -> int:
        """How many of some blocks have been reported, when all have or time is up."""
        for _ in range(int(EVENTS_S / 0.05)):
            if self.hashes.issuperset(hashes):
                break
            await asyncio.sleep(0.05)
        return sum(block in self.hashes for block in hashes)


def item_of(place: list[Any], kind: str, data: bytes) -> MediaItem:
    """One media item."""
    offset, length, short = place
    digest = content_hash(data)
    packed = array("I", short).tobytes()
    return MediaItem(
        MediaSpan(MediaKind[kind.upper()], digest, offset, length, packed, length), MediaFile(digest, data)
    )


async def ask(engine: VllmEngine, name: str, question: dict[str, Any]) -> tuple[GenerateRequest, dict[str, Any]]:
    """One request, and the answer to it."""
    files = [base64.b64decode(text) for text in question["files"]]
    kinds = question.get("kinds") or ["image"] * len(files)
    request = GenerateRequest(
        name,
        "tiny",
        array("I", question["ids"]),
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_tokens=question["max_tokens"], ignore_eos=True),
        media=tuple(map(item_of, question["spans"], kinds, files)),
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
    return request, answer


async def answered(engine: VllmEngine, config: EngineConfig, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to every request, in order."""
    stored, answers = Stored(engine), []
    for number, question in enumerate(questions):
        request, answer = await ask(engine, f"r{number}", question)
        if not answer["error"]:
            spans = [item.span for item in request.media]
            answer["stored"] = await stored.count(block_hashes(request.token_ids, config.block_size, media=spans))
        answers.append(answer)
    return answers


async def run(question: dict[str, Any]) -> dict[str, Any]:
    """Starts the engine, and asks it."""
    engine = VllmEngine.from_args(WorkerSettings.load(question["argv"]))
    try:
        config = await engine.start("inside")
        answers = await answered(engine, config, question["requests"])
        return {"capabilities": sorted(config.capabilities), "answers": answers}
    finally:
        await engine.cleanup()


def main() -> None:
    """Reads the question from standard input."""
    print(json.dumps(asyncio.run(run(json.load(sys.stdin)))))


if __name__ == "__main__":
    main()
