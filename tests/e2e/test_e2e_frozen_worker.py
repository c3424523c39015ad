"""A worker that is stopped (SIGSTOP) with requests: they are answered by the other worker, within seconds."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import httpx

from tests.support.clients.chat_answers import streamed, whole
from tests.support.data.tiny_models import build_tiny_model
from tests.support.servers.loose_suite import LooseSuite

NOTICED_S = 15.0
"""As docs/resilience.md has it."""
SLACK_S = 10.0
"""For the rest of the answers, on a busy machine."""
WORKER_FLAGS = ("--engine-args", "timing=fixed,fixed_step_ms=20", "--canary-s", "0")


def body(number: int, tokens: int) -> dict[str, Any]:
    said = f"Tell me of number {number}."
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": said}],
        "seed": 3,
        "max_tokens": tokens,
        "ignore_eos": True,
    }


async def test_requests_of_a_stopped_worker_are_answered_by_another_within_the_documented_time(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "tiny")
    with LooseSuite(model, postprocess=1, worker_flags=WORKER_FLAGS) as suite:
        async with httpx.AsyncClient(base_url=suite.url, timeout=90) as client:
            running = [body(number, 200) for number in range(8)]
            fresh = [body(number, 20) for number in range(8, 40)]
            expected = await asyncio.gather(*(whole(client, request) for request in (*running, *fresh)))
            started = asyncio.Semaphore(0)
            asked = [asyncio.create_task(streamed(client, request, started.release)) for request in running]
            for _ in range(10 * len(running)):
                await started.acquire()
            suite.end("worker-0", signal.SIGSTOP)
            stopped_at = time.monotonic()
            asked += [asyncio.create_task(whole(client, request)) for request in fresh]
            answers = await asyncio.gather(*asked)
            seconds = time.monotonic() - stopped_at
            suite.end("worker-0", signal.SIGCONT)
            assert [answer.same for answer in answers] == [answer.same for answer in expected]
            assert sum(answer.choice.get("migrations", 0) for answer in answers) > 0
            assert seconds <= NOTICED_S + SLACK_S
            await asyncio.to_thread(suite.wait_ready, 2)
