"""Workers that invent names of models: what each name costs the services that discover them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import httpx
import psutil

from services.common.packages.model_files import DEFAULT_SOURCE, fingerprint, resolve
from sluice.v1 import common_pb2
from tests.support.fakes.hostile_worker import HostileWorker, card
from tests.support.servers.suite import Suite

NAMES = 12
MAX_GROWTH = 240 << 20
"""For all names after the first: files in transfer take 19 MiB each, up to seven at a time, also with 24 names; copies
of the tokenizer would take 49 MiB a name, 539 in all."""


def resident(processes: list[psutil.Process]) -> int:
    return sum(process.memory_info().rss for process in processes)


async def until_served(http: httpx.AsyncClient, model: str) -> None:
    """Waits until preprocess has the model's tokenizer, whose check takes seconds."""
    body = {"model": model, "prompt": "a"}
    async with asyncio.timeout(120):
        while (answer := await http.post("/tokenize", json=body)).status_code in (404, 503, 504):  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    assert answer.status_code == 200, answer.text


async def test_names_that_a_worker_invents_share_one_tokenizer_in_preprocess_and_postprocess(attacked: Suite) -> None:
    file = resolve(DEFAULT_SOURCE)
    spec = common_pb2.TokenizerSpec(processor="mistral", fingerprint=fingerprint(file))
    services = {name: attacked.processes(name)[:1] for name in ("preprocess", "postprocess")}
    before: dict[str, int] = {}
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=attacked.url, timeout=90))
        for number in range(NAMES):
            model = f"invented-{number}"
            worker = await stack.enter_async_context(HostileWorker(model, model, tokenizer=file))
            attached = await worker.attach(attacked.address("router"), card=card(model, tokenizer=spec))
            stack.push_async_callback(attached.close)
            if not number:
                await until_served(http, model)
                before = {name: resident(processes) for name, processes in services.items()}
        await asyncio.gather(*(until_served(http, f"invented-{number}") for number in range(NAMES)))
        growth = {name: resident(processes) - before[name] for name, processes in services.items()}
    assert max(growth.values()) < MAX_GROWTH, growth
