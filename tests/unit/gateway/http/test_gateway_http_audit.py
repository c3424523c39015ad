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

from services.common.base import logs
from services.common.base.errors import SluiceError, not_found
from services.common.base.tasks import TaskOwner
from services.common.observability.audit import AuditEntry, AuditSettings
from services.gateway.core import context
from services.gateway.core.request import (
    NULL_SINK,
    Finish,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    StopParams,
    TextPrompt,
    TokenizedPrompt,
)
from services.gateway.http.errors import error_response
from services.gateway.http.middleware.audit import AuditMiddleware, open_audit_log
from services.gateway.streams.audit import AuditObserver, recorded
from services.gateway.streams.interfaces import CANCELLED, StreamEnd
from services.gateway.streams.manager import NO_RECOVERY
from services.gateway.streams.stream import GenerationStream


class ObservedStream:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def text(self, piece: str) -> None:
        self.said.append(piece)

    def finish(self, finish: Any) -> None:
        self.said.append("finished")


FINISH = Finish(FinishReason.STOP)
PROMPT = TokenizedPrompt(bytes(40), b"", "", b"", b"", 100, b"")


def stream(index: int) -> GenerationStream:
    request = GenerationRequest("r1", "m", TextPrompt("x"), 2, SamplingParams(), StopParams())
    return GenerationStream(index, request, index, PROMPT, 10, NULL_SINK, context.current(), NO_RECOVERY)


def application() -> FastAPI:
    app = FastAPI()

    @app.post("/v1/generate")
    async def generate(request: Request) -> Response:
        await request.body()
        entry = context.current().audit
        if entry is None:
            return PlainTextResponse("not audited")
        entry.key = "k7"
        sink, observer = ObservedStream(), AuditObserver()
        first, second = stream(0), stream(1)
        for one in (first, second):
            observer.on_started(one)
            observer.on_assigned(one, "a")
        observer.on_assigned(second, "b")
        listening = recorded(sink, entry)  # type: ignore[arg-type]
        listening.text("hel")
        listening.text("lo")
        listening.finish(FINISH)
        first.completion_tokens, first.cached_tokens, second.completion_tokens = 3, 8, 4
        observer.on_ended(first, StreamEnd(FINISH))
        observer.on_ended(second, CANCELLED if request.query_params.get("gone") else StreamEnd(FINISH))
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
        raise AssertionError("the deadline was missed")

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.exception_handler(SluiceError)
    async def typed(request: Request, error: SluiceError) -> Response:
        return error_response(error)

    return app


async def audited(path: Path, **more: Any) -> tuple[httpx.AsyncClient, Any]:
    app, tasks = application(), TaskOwner()
    log = open_audit_log(AuditSettings(audit_log=str(path), **more), tasks)
    assert log is not None
    app.add_middleware(AuditMiddleware, entries=log)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    async def finish() -> list[dict[str, Any]]:
        await tasks.close()
        log.close()
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


async def test_without_an_audit_log_nothing_is_noted() -> None:
    app, tasks = application(), TaskOwner()
    assert open_audit_log(AuditSettings(), tasks) is None
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        assert (await http.post("/v1/generate")).text == "not audited"
    assert tasks.alive == 0


def test_audit_entry_with_content_leaves_out_the_base64_text_of_media_files() -> None:
    entry = AuditEntry("/v1/chat/completions", with_content=True)
    entry.read(b'{"url": "data:image/png;base64,' + b"QUJD\\/" * 100 + b'", "text": "kept"}')
    entry.read(b'{"source": {"data": "' + b"QUJD" * 20_000)
    request = json.loads(entry.line())["request"]
    assert "QUJD" not in request
    assert request == '{"url": "data:image/png;base64,…", "text": "kept"}{"source": {"data": "…'
