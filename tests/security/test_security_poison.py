"""One request ends every worker that runs it: two of four die, and the streams beside it finish as undisturbed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import psutil
import pytest

from tests.support.clients.chat_answers import streamed, whole
from tests.support.data.tiny_models import build_tiny_model
from tests.support.servers.loose_suite import LooseSuite
from tests.support.waiting import until

WAIT_S = 180
STREAMS = 24
POISON = 377
FLAGS = ("--engine-args", f"timing=fixed,fixed_step_ms=20,fault=poison={POISON}")


def body(number: int) -> dict[str, Any]:
    said = f"Tell me of number {number}."
    more = {"max_tokens": 60, "ignore_eos": True, "seed": number, "temperature": 0.7}
    return {"model": "tiny", "messages": [{"role": "user", "content": said}], **more}


@pytest.fixture
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LooseSuite]:
    folder = build_tiny_model(tmp_path_factory.mktemp("poison") / "tiny")
    with LooseSuite(folder, workers=4, postprocess=1, worker_flags=FLAGS) as running:
        yield running


def living(suite: LooseSuite) -> list[str]:
    """The workers whose processes run."""
    return [
        name
        for name in suite.workers
        if psutil.pid_exists(suite.pid(name)) and psutil.Process(suite.pid(name)).status() != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.parametrize("choices", [1, 2])
async def test_request_that_ends_its_workers_ends_two_of_four_and_no_stream_beside_it(
    suite: LooseSuite, choices: int
) -> None:
    async with httpx.AsyncClient(base_url=suite.url, timeout=WAIT_S) as client:
        told = await asyncio.gather(*(whole(client, body(number)) for number in range(STREAMS)))
        began: set[int] = set()
        asked = [
            asyncio.create_task(streamed(client, body(number), partial(began.add, number))) for number in range(STREAMS)
        ]
        await until(lambda: len(began) >= STREAMS // 2, WAIT_S)
        poison = {"model": "tiny", "prompt": [POISON, 20, 21], "max_tokens": 5, "n": choices}
        refused = await client.post("/v1/completions", json=poison)
        assert refused.status_code == 502, refused.text
        assert "Traceback" not in refused.text
        for number, answer in enumerate(await asyncio.gather(*asked)):
            assert answer.same == told[number].same, f"number {number}"
        assert len(living(suite)) == 2
        assert (await whole(client, body(0))).same == told[0].same
