"""The gateway serves without an extension that it cannot use, and reports it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from services.common.base.errors import SluiceError
from services.common.packages import extensions
from services.common.packages.extensions import OBSERVERS, OWN, Extension, load_group
from services.gateway.admission.keys import STRANGER
from services.gateway.admission.permit import Permit
from services.gateway.app.application import add_no_observer
from services.gateway.app.readiness import Readiness
from services.gateway.http.errors import error_response


@pytest.mark.parametrize(("is_enabled", "reason"), [(False, "start the gateway with --ui"), (True, "not installed")])
async def test_live_view_that_is_absent_is_not_found_with_the_reason(is_enabled: bool, reason: str) -> None:
    app = FastAPI()
    add_no_observer(app, is_enabled)

    async def typed(request: Request, error: Exception) -> Response:
        assert isinstance(error, SluiceError)
        return error_response(error)

    app.add_exception_handler(SluiceError, typed)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as client:
        for path in ("/ui", "/ui/", "/ui/main.js", "/ui/data/state", "/ui/data/stream"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "ui_off")
            assert reason in answer.json()["error"]["message"]


def test_extension_without_its_package_is_missing_with_one_sentence_and_the_command_of_pip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [
        Extension(OBSERVERS, "logs", "logging:getLogger", OWN, "1"),
        Extension(OBSERVERS, "pictures", "absent_pictures.view:View", OWN, "1", "gateway"),
    ]
    monkeypatch.setattr(extensions, "_extensions", lambda group: found)
    reported: list[str] = []
    loaded = load_group(OBSERVERS, reported.append)
    sentence = (
        "Extension pictures of sluice-llm cannot be loaded: the module absent_pictures is not installed; "
        'run: pip install "sluice-llm[gateway]".'
    )
    assert loaded.usable == {"logs": logging.getLogger}
    assert loaded.missing == {"pictures": sentence}
    assert reported == [sentence]


def test_ready_names_missing_extensions_without_a_key_too() -> None:
    nothing = cast(Any, SimpleNamespace(replicas=SimpleNamespace(serving=()), synced=True, models={}, set_aside={}))
    connections = cast(Any, SimpleNamespace(postprocess=SimpleNamespace(serving=()), connected_workers=0))
    readiness = Readiness(nothing, nothing, nothing, connections, (), {"pictures": "It is broken."})
    report = readiness.report(Permit(STRANGER, "r", None, None), 0)
    assert report["ready"]
    assert report["missing_extensions"] == ["pictures"]
