"""What the gateway writes of a request into its audit log, whatever the application does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from services.common import logs
from services.common.errors import SluiceError, not_found
from services.common.observability.audit import AuditSettings
from services.common.tasks import TaskOwner
from services.gateway.core import request_audit
from services.gateway.http.errors import error_response
from services.gateway.http.middleware import audit as auditing


class ObservedStream:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def text(self, piece: str) -> None:
        self.said.append(piece)

    def finish(self, finish: Any) -> None:
        self.said.append("finished")


def application() -> FastAPI:
    app = FastAPI()

    @app.post("/v1/generate")
    async def generate(request: Request) -> Response:
        await request.body()
        request_audit.known("k7")
        first, second = (request_audit.of_request() for _ in range(2))
        if first is None or second is None:
            return PlainTextResponse("not audited")
        sink = ObservedStream()
        first.began("r1", "m", 10)
        second.began("r1", "m", 0)
        first.worked_on_by("a")
        second.worked_on_by("a")
        second.worked_on_by("b")
        listening = first.listening(sink)  # type: ignore[arg-type]
        listening.text("hel")
        listening.text("lo")
        listening.finish(None)  # type: ignore[arg-type]
        first.ended(3, 8, None, gone=False)
        second.ended(4, 0, None, gone=bool(request.query_params.get("gone")))
        return PlainTextResponse("|".join(sink.said))

    @app.post("/v1/refuse")
    async def refuse() -> Response:
        raise not_found("There is no such thing.", code="thing_not_found")

    @app.post("/v1/break")
    async def broken() -> Response:
        logs.request_id.set("r9")
        raise RuntimeError("a defect")

    @app.post("/v1/wait")
    async def wait() -> Response:
        await asyncio.sleep(60)
        raise AssertionError("nobody waits so long")

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.exception_handler(SluiceError)
    async def typed(request: Request, error: SluiceError) -> Response:
        return error_response(error)

    return app


async def audited(path: Path, **more: Any) -> tuple[httpx.AsyncClient, Any]:
    app, tasks = application(), TaskOwner()
    close = auditing.attach(app, AuditSettings(audit_log=str(path), **more), tasks)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    async def finish() -> list[dict[str, Any]]:
        await tasks.close()
        close()
        return [json.loads(line) for line in (await asyncio.to_thread(path.read_text)).splitlines()]

    return httpx.AsyncClient(transport=transport, base_url="http://gateway"), finish


async def test_choices_of_a_request_are_added_up(tmp_path: Path) -> None:
    http, finish = await audited(tmp_path / "audit")
    await http.post("/v1/generate", content=b"a secret body")
    await http.post("/v1/generate?gone=1")
    await http.get("/health")
    one, two = await finish()
    assert (one["request_id"], one["key"], one["model"], one["workers"]) == ("r1", "k7", "m", ["a", "b"])
    assert (one["prompt_tokens"], one["cached_tokens"], one["output_tokens"]) == (10, 8, 7)
    assert (one["outcome"], one["status"], two["outcome"]) == ("completed", 200, "cancelled")
    assert "secret" not in json.dumps(one)
    assert "answer" not in one


async def test_audit_with_content_has_body_and_answer(tmp_path: Path) -> None:
    http, finish = await audited(tmp_path / "audit", audit_content=True)
    answer = await http.post("/v1/generate", content=b"a body")
    assert answer.text == "hel|lo|finished"
    (one,) = await finish()
    assert (one["request"], one["answer"]) == ("a body", "hello")


async def test_audit_outcome_of_an_error_is_its_code(tmp_path: Path) -> None:
    http, finish = await audited(tmp_path / "audit")
    await http.post("/v1/refuse")
    await http.post("/v1/break")
    await http.post("/v1/nothing")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(http.post("/v1/wait"), 2.0)
    lines = await finish()
    assert [(line["outcome"], line["status"]) for line in lines] == [
        ("thing_not_found", 404),
        ("internal", 0),
        ("refused", 404),
        ("cancelled", 0),
    ]
    assert lines[1]["request_id"] == "r9"


async def test_without_an_audit_log_nothing_is_noted(tmp_path: Path) -> None:
    app, tasks = application(), TaskOwner()
    close = auditing.attach(app, AuditSettings(), tasks)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        assert (await http.post("/v1/generate")).text == "not audited"
    close()
    assert tasks.alive == 0
