"""The live view's stream and paths: bounded, read-only, and from this host alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from services.common.base.errors import SluiceError
from services.gateway.apis.live_view.endpoints import DATA, add_live_view
from services.gateway.apis.live_view.feed import MAX_PENDING, Feed
from services.gateway.apis.live_view.routing_explanations import MAX_SCORES, RoutingExplanations
from services.gateway.apis.live_view.view import LiveView
from services.gateway.core.request import Route, Score
from services.gateway.http.errors import error_response
from services.gateway.http.middleware.scopes import LIVE_PAGE
from services.gateway.http.pages import page_files

WHOLE = b"whole"

PACKAGE = "services.gateway.apis.live_view"


async def test_a_viewer_gets_everything_once_and_then_what_changes() -> None:
    feed = Feed(2, lambda: WHOLE)
    events = feed.join()
    assert await anext(events) == WHOLE
    feed.publish(b"1")
    feed.publish(b"2")
    assert await anext(events) == b"12"


async def test_viewer_beyond_the_bound_is_overloaded() -> None:
    with pytest.raises(SluiceError) as refused:
        Feed(0, lambda: WHOLE).join()
    assert (refused.value.http_status, error_response(refused.value).headers["retry-after"]) == (503, "10")


async def test_a_viewer_that_does_not_read_starts_afresh_and_holds_nothing() -> None:
    feed = Feed(1, lambda: WHOLE)
    events = feed.join()
    await anext(events)
    for _ in range(MAX_PENDING + 1):
        feed.publish(b"old")
    feed.publish(b"older than the whole that comes next")
    assert await anext(events) == WHOLE
    feed.publish(b"new")
    assert await anext(events) == b"new"


async def test_one_viewer_too_many_hears_it_and_one_that_leaves_makes_room() -> None:
    feed = Feed(1, lambda: WHOLE)
    events = cast(Any, feed.join())
    await anext(events)
    with pytest.raises(SluiceError, match="already open"):
        feed.join()
    await events.aclose()
    assert await anext(feed.join()) == WHOLE


async def test_viewers_that_come_in_the_same_moment_are_bounded_too() -> None:
    feed = Feed(1, lambda: WHOLE)
    first, second = feed.join(), feed.join()
    assert await anext(first) == WHOLE
    assert [event async for event in second] == []


async def test_streams_end_when_the_gateway_stops() -> None:
    feed = Feed(1, lambda: WHOLE)

    async def read(events: AsyncIterator[bytes]) -> list[bytes]:
        return [event async for event in events]

    events = feed.join()
    assert await anext(events) == WHOLE
    reading = asyncio.create_task(read(events))
    await asyncio.sleep(0)
    feed.close()
    async with asyncio.timeout(10):
        assert await reading == []
    with pytest.raises(SluiceError, match="stopping"):
        feed.join()


def score(worker: str, cost: float) -> Score:
    return Score(worker, 0, cost, (0, 0, 0), 0, 0.0, 0.0)


def test_explanations_with_a_viewer_are_one_a_second() -> None:
    now, looked_at = 10.0, True
    explanations = RoutingExplanations(lambda: looked_at, lambda: now)
    assert explanations.wanted()
    assert not explanations.wanted()
    now += 1
    looked_at = False
    assert not explanations.wanted()


def test_the_chosen_worker_is_among_the_scores_however_many_there_are() -> None:
    explanations = RoutingExplanations(lambda: True)
    scores = tuple(score(f"w-{number}", number) for number in range(50))
    explanations.record("r", Route("w-40", scores=scores))
    assert explanations.last is not None
    assert explanations.last.candidates == 50
    shown = [one.worker for one in explanations.last.scores]
    assert len(shown) == MAX_SCORES
    assert (shown[0], shown[-1]) == ("w-0", "w-40")


def app(view: LiveView) -> httpx.AsyncClient:
    made = FastAPI()
    add_live_view(made, view)

    async def typed(request: Request, error: Exception) -> Response:
        assert isinstance(error, SluiceError)
        return error_response(error)

    made.add_exception_handler(SluiceError, typed)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=made), base_url="http://gateway")


async def test_the_page_and_every_file_it_names_are_served_under_a_strict_policy() -> None:
    async with app(cast(LiveView, object())) as client:
        assert (await client.get("/ui")).headers["location"] == "ui/"
        page = await client.get("/ui/")
        for name in re.findall(r'(?:href|src)="([^"#]+)"', page.text):
            answer = await client.get(f"/ui/{name}")
            assert answer.status_code == 200, name
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'")
            assert "unsafe" not in policy
            again = await client.get(f"/ui/{name}", headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await client.get("/ui/../settings.py")).status_code == 404
        assert (await client.get("/ui/view.py")).status_code == 404
        assert (await client.post("/ui/")).status_code == 405


def test_no_file_names_another_host_and_modules_import_what_is_there() -> None:
    files = page_files(PACKAGE)
    assert {"index.html", "main.js", "style.css"} <= set(files)
    for name, file in files.items():
        text = file.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE), name
        assert not re.search(r"\bstyle=|\son[a-z]+=\"|innerHTML|\beval\b", text), name
        for imported in re.findall(r'from "\./([^"]+)"', text):
            assert imported in files, f"{name} imports {imported}"


def test_without_a_key_only_the_page_is_open() -> None:
    assert all(LIVE_PAGE.fullmatch(path) for path in ("/ui", "/ui/", *(f"/ui/{name}" for name in page_files(PACKAGE))))
    closed = (DATA + "/state", DATA + "/stream", DATA + "/requests/x", "/uix", "/ui//data/state", "/ui/data/")
    assert not any(LIVE_PAGE.fullmatch(path) for path in closed)
