"""A tenant that keeps streams running leaves room to others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.base.tasks import TaskOwner
from services.gateway.admission.builder import build_gate
from services.gateway.admission.keys import create, write
from services.gateway.admission.settings import AdmissionSettings
from services.gateway.http.middleware.admission import AdmissionMiddleware


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/generate"])
async def test_streams_of_one_tenant_leave_room_to_others_in_every_dialect(tmp_path: Path, path: str) -> None:
    keys = [create(name, tenant=name) for name in ("flood", "innocent")]
    write(tmp_path / "keys.json", [record for _, record in keys])
    flood, innocent = ({"authorization": f"Bearer {text}"} for text, _ in keys)
    settings = AdmissionSettings(api_keys_file=tmp_path / "keys.json", max_requests=8, max_waiting=8, queue_timeout_s=1)
    gate = build_gate(settings, "127.0.0.1:8000", TaskOwner())
    end, running = asyncio.Event(), 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal running
        running += 1
        if dict(scope["headers"])[b"authorization"].decode() == flood["authorization"]:
            await end.wait()
        await Response()(scope, receive, send)

    transport = httpx.ASGITransport(AdmissionMiddleware(app, gate))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=30) as http:
        streams = [asyncio.create_task(http.post(path, headers=flood)) for _ in range(20)]
        while running + sum(stream.done() for stream in streams) < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await http.post(path, headers=innocent)).status_code == 200
        end.set()
        responses = await asyncio.gather(*streams)
    assert sorted(response.status_code for response in responses) == [200] * 6 + [429] * 14
    refusal = next(response for response in responses if response.status_code == 429)
    assert "--max-requests-per-tenant" in refusal.text
    assert int(refusal.headers["retry-after"]) >= 1
