"""Who waits for another process keeps no thread from those who compute."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from services.common.models import ModelSpec
from services.preprocess.limits import Limits
from services.preprocess.service import PreprocessService
from services.preprocess.templates.processes import TemplateProcesses
from services.preprocess.thread_pool import ComputePool
from services.preprocess.tokenizers.loading import load_tokenizer
from services.preprocess.tokenizers.registry import ModelRegistry
from sluice.v1 import preprocess_pb2
from tests.support.data.loaded_tokenizers import tiny_folder

MESSAGES = b'[{"role": "user", "content": "hi"}]'


class Stuck(TemplateProcesses):
    """Processes for clients' templates that are busy until they are told."""

    def __init__(self) -> None:
        super().__init__(1, 2.0, 1 << 20, 512)
        self.go = threading.Event()

    async def of_client(self, source: str, variables: bytes) -> str:
        await asyncio.to_thread(self.go.wait, 60)  # called on another loop than the test's
        return "hi"


async def test_templates_of_clients_that_hang_take_no_thread_from_the_others() -> None:
    stuck = Stuck()
    limits = Limits(1 << 20, 2.0, stuck)
    registry = ModelRegistry([ModelSpec("tiny", str(tiny_folder()))], lambda spec: load_tokenizer(spec, limits))
    await registry.preload()
    pool, waiters, foreign = ComputePool(2, 64, 1024, 30), ComputePool(2, 64, 0, 60), ComputePool(8, 64, 0, 60)
    service = PreprocessService(registry, pool, 1 << 20, waiters, foreign)
    hostile = preprocess_pb2.ChatInput(messages_json=MESSAGES, chat_template="{% for a in range(99999) %}{% endfor %}")
    held: list[asyncio.Task[Any]] = [
        asyncio.create_task(service._tokenize(preprocess_pb2.TokenizeRequest(model="tiny", chat=hostile))),
        asyncio.create_task(service._tokenize(preprocess_pb2.TokenizeRequest(model="tiny", chat=hostile))),
        asyncio.create_task(service._render(preprocess_pb2.RenderRequest(model="tiny", chat=hostile))),
    ]
    await asyncio.sleep(0)
    large = preprocess_pb2.TokenizeRequest(model="tiny", text=preprocess_pb2.TextInput(text="word " * 1000))
    try:
        async with asyncio.timeout(10):
            assert (await service._tokenize(large)).token_ids
        assert not any(task.done() for task in held)
        assert (pool.taken, waiters.taken, foreign.taken) == (0, 0, 0)
    finally:
        stuck.go.set()
    await asyncio.gather(*held)
    for each in (pool, waiters, foreign):
        each.close()
