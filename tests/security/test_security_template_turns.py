"""A tenant that sends slow templates delays mostly itself, in the gateway and in preprocess."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.common.base.packing import pack_u32
from services.gateway.admission.keys import ApiKey
from services.gateway.admission.permit import Permit
from services.gateway.backends.rpc.preprocess import TEMPLATES_AT_ONCE, PreprocessClient
from services.gateway.core import context
from services.gateway.core.context import RequestContext
from services.gateway.core.request import ChatPrompt, TextPrompt
from services.preprocess.templates.child import job
from services.preprocess.templates.processes import TemplateProcesses
from sluice.v1 import preprocess_pb2

OWN = ChatPrompt(b"[]", chat_template="{{ 1 }}")
SLOW = "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}" * 50
JOB = job({"messages": []}, None)
LIMIT_S = 0.5


@pytest.fixture
async def processes() -> AsyncIterator[TemplateProcesses]:
    made = TemplateProcesses(1, LIMIT_S, 100_000, 256, loop=asyncio.get_running_loop())
    await made.of_client("{{ 1 }}", JOB)  # the first start takes longer
    yield made
    await made.aclose()


async def tokenized(client: PreprocessClient, tenant: str, prompt: ChatPrompt | TextPrompt) -> int:
    """Tokenizes a prompt for a request of a tenant; returns its length."""
    context.enter(RequestContext(permit=Permit(ApiKey(tenant, "", ""), "", None, None)))
    return (await client.tokenize("m", prompt)).length


async def test_tokenize_does_not_wait_for_templates_of_another_tenant() -> None:
    client = PreprocessClient(["127.0.0.1:1"], None, 10.0)
    held: list[preprocess_pb2.TokenizeRequest] = []

    async def call(method: Any, request: Any, timeout_s: float, hedge: str = "", waits: bool = False) -> Any:
        if request.chat.origin == "hog":
            assert waits
            assert not hedge
            held.append(request)
            await asyncio.Event().wait()
        return preprocess_pb2.TokenizeResponse(token_ids=pack_u32([1]))

    client.replicas.call = call  # type: ignore[method-assign, assignment]
    hogs = [asyncio.create_task(tokenized(client, "hog", OWN)) for _ in range(400)]
    await asyncio.sleep(0.1)
    assert len(held) == TEMPLATES_AT_ONCE
    async with asyncio.timeout(10):
        assert await asyncio.create_task(tokenized(client, "other", OWN)) == 1
        assert await asyncio.create_task(tokenized(client, "hog", TextPrompt("a", None))) == 1
    for hog in hogs:
        hog.cancel()
    await asyncio.gather(*hogs, return_exceptions=True)


async def test_template_of_one_origin_does_not_wait_for_all_those_of_another(processes: TemplateProcesses) -> None:
    hogs = [asyncio.create_task(processes.of_client(SLOW, JOB, "hog")) for _ in range(40)]
    await asyncio.sleep(0.1)
    for number in range(3):
        assert (await processes.of_client("{{ 1 + 1 }}", JOB, "other")).text == "2"
        assert sum(hog.done() for hog in hogs) <= 3 * (number + 1)
    for hog in hogs:
        hog.cancel()
    await asyncio.gather(*hogs, return_exceptions=True)
