"""What the mock engine makes of prompts outside of any worker: a JSON document in, one out (see engine_suite)."""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from typing import Any

from services.worker.contract.engine import GenerateContext
from services.worker.contract.generation import GenerateRequest, SamplingParams, StopParams
from services.worker.engines.mock.engine import MockEngine
from services.worker.settings import WorkerSettings


async def answer(question: dict[str, Any]) -> dict[str, Any]:
    """One request after the other, each with an empty cache behind it."""
    model = ("--model", f"tiny={question['model']}")
    engine = MockEngine.from_args(WorkerSettings.load([*model, "--engine-args", "timing=fixed", "--speedup", "1000"]))
    await engine.start("offline")
    try:
        if question.get("embed"):
            made = await engine.embed([array("I", prompt) for prompt in question["prompts"]], 0)
            return {"embeddings": [list(memoryview(vector).cast("f")) for vector in made.vectors]}
        return {"outputs": [await _generated(engine, question, prompt) for prompt in question["prompts"]]}
    finally:
        await engine.cleanup()


async def _generated(engine: MockEngine, question: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    request = GenerateRequest(
        "offline",
        "tiny",
        array("I", prompt),
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_tokens=question["max_tokens"], ignore_eos=True),
        logprobs=question.get("logprobs"),
    )
    deltas = [delta async for delta in engine.generate(request, GenerateContext("offline"))]
    positions = [position for delta in deltas for position in delta.logprobs]
    return {
        "token_ids": [token_id for delta in deltas for token_id in delta.token_ids],
        "logprobs": [{str(one.token_id): one.logprob for one in position.top} for position in positions],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(answer(json.load(sys.stdin)))))
