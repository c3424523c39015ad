"""The live view: counts, bounds, viewers, and who may read what."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response

from services.common.errors import SluiceError
from services.gateway.core.request import (
    GenerationRequest,
    Route,
    SamplingParams,
    Score,
    StopParams,
    TextPrompt,
    TokenizedPrompt,
)
from services.gateway.http.errors import error_response
from services.gateway.http.middleware.scopes import LIVE_PAGE
from services.gateway.live_view.endpoints import DATA, add_live_view
from services.gateway.live_view.feed import STALE_ROUTER_CODES, Feed
from services.gateway.live_view.files import page_files
from services.gateway.live_view.rates import KEPT_SAMPLES, RateMeter
from services.gateway.live_view.request_history import FRESH, KEPT, REASONS, PromptTimes, RequestHistory, prompt_times
from services.gateway.live_view.routing_explanations import MOST_SCORES, RoutingExplanations
from services.gateway.live_view.view import LiveView
from services.gateway.live_view.worker_table import MOST_GONE, MOST_ROWS, LinkState, WorkerTable, hit_rates
from services.gateway.streams.stream import GenerationStream

PROMPT = TokenizedPrompt(b"\1\0\0\0" * 8, b"", "", b"", b"", 100, b"")


def stream(slot: int, worker: str = "w", index: int = 0) -> GenerationStream:
    request = GenerationRequest(f"r-{slot}", "m", TextPrompt("x"), 2, SamplingParams(), StopParams())
    made = GenerationStream(slot, request, index, PROMPT, 100, cast(Any, None), cast(Any, None))
    made.worker = cast(Any, SimpleNamespace(worker_id=worker))
    return made


def ended(
    request_history: RequestHistory, slot: int, outcome: str = "finished", worker: str = "w", cached: int = 0
) -> None:
    one = stream(slot, worker)
    request_history.began(one, worker)
    one.tokens.extend((1, 2))
    one.cached_tokens = cached
    request_history.over(one, outcome)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["begin", "tokens", "look", "move", "end"])), max_size=80))
def test_totals_of_any_sequence_equal_the_sum_of_the_streams(steps: list[tuple[int, str]]) -> None:
    request_history, live, tokens, begun, over = RequestHistory(), dict[int, GenerationStream](), 0, 0, 0
    for slot, step in steps:
        one = live.get(slot)
        if step == "begin" and one is None:
            live[slot] = stream(slot)
            request_history.began(live[slot], "w")
            begun += 1
        elif step == "look":
            request_history.meter()
        elif one is not None and step == "tokens":
            one.tokens.extend((1, 2, 3))
            tokens += 3
        elif one is not None and step == "move":
            one.worker = cast(Any, SimpleNamespace(worker_id="other"))
        elif one is not None and step == "end":
            request_history.over(live.pop(slot), "finished")
            over += 1
    request_history.meter()
    assert (
        request_history.totals.output_tokens
        == tokens
        == sum(one.output_tokens for one in request_history.workers.values())
    )
    assert (
        (request_history.totals.requests, request_history.totals.ended)
        == (begun, over)
        == (begun, len(request_history.recent))
    )


def test_a_stream_ends_once() -> None:
    request_history, one = RequestHistory(), stream(1)
    request_history.began(one, "w")
    request_history.over(one, "finished")
    request_history.over(one, "cancelled")
    assert [done.outcome for done in request_history.recent] == ["finished"]
    assert request_history.totals.failed == 0


def test_a_year_takes_no_more_than_an_hour() -> None:
    request_history = RequestHistory()
    for slot in range(3 * KEPT):
        one = stream(slot)
        request_history.began(one, "w")
        one.degraded = (f"reason-{slot}",)
        request_history.over(one, "finished")
    assert (len(request_history.recent), len(request_history.fresh), len(request_history.degraded)) == (
        KEPT,
        FRESH,
        REASONS,
    )
    assert len(request_history.take_fresh()) == FRESH
    assert request_history.take_fresh() == []


def test_stages_follow_each_other_and_the_first_choice_has_the_answers_id() -> None:
    request_history = RequestHistory()
    one, other = stream(1), stream(2, index=1)
    prompt_times.set(PromptTimes(one.started_at - 0.5, one.started_at - 0.3))
    one.first_text_at = one.started_at + 0.0001
    for each in (one, other):
        request_history.began(each, "w")
        request_history.over(each, "stalled")
    done, second = request_history.recent
    assert (done.id, second.id) == ("r-1", "r-2-1")
    assert (round(done.tokenize_ms), round(done.route_ms), round(done.first_ms, 1)) == (200, 300, 0.1)
    assert request_history.totals.failed == 2


def test_rates_are_what_came_in_a_second() -> None:
    request_history, meter = RequestHistory(), RateMeter()
    ended(request_history, 1)
    ended(request_history, 2, "stalled")
    rates = meter.sample(request_history.totals, 7, 2.0)
    assert (rates.requests, rates.failed, rates.output_tokens, rates.prompt_tokens, rates.live) == (1, 0.5, 2, 8, 7)
    for _ in range(2 * KEPT_SAMPLES):
        assert meter.sample(request_history.totals, 0, 1.0).requests == 0
    assert len(meter.history) == KEPT_SAMPLES


def test_hit_rates_are_of_finished_prompts() -> None:
    request_history = RequestHistory()
    ended(request_history, 1, worker="a", cached=8)
    ended(request_history, 2, worker="a", cached=4)
    ended(request_history, 3, "cancelled", worker="b", cached=8)
    assert hit_rates(list(request_history.recent)) == {"a": 0.75}


def link(connected: bool = True, sound: bool = True) -> LinkState:
    return LinkState("127.0.0.1:1", "m", connected, sound, 0)


def test_a_worker_that_vanishes_is_red_for_a_minute() -> None:
    now = 100.0
    worker_table = WorkerTable(RequestHistory(), lambda: now)
    worker_table.update({"a": link(), "b": link(sound=False), "c": link(connected=False)}, [], 1.0)
    assert {row.id: row.health for row in worker_table.rows.values()} == {
        "a": "ok",
        "b": "troubled",
        "c": "unreachable",
    }
    worker_table.update({"b": link()}, [], 1.0)
    assert {row.id: row.health for row in worker_table.rows.values()} == {"a": "gone", "b": "ok", "c": "gone"}
    now += 59
    worker_table.update({"a": link()}, [], 1.0)
    assert {row.id: row.health for row in worker_table.rows.values()} == {"a": "ok", "b": "gone", "c": "gone"}
    now += 2
    worker_table.update({"a": link()}, [], 1.0)
    assert {row.id: row.health for row in worker_table.rows.values()} == {"a": "ok", "b": "gone"}


def test_many_workers_are_cut_to_the_limit_and_failing_ones_are_kept() -> None:
    worker_table = WorkerTable(RequestHistory())
    links = {f"w-{number:04}": link(connected=number != 1999) for number in range(2000)}
    worker_table.update(links, [], 1.0)
    shown = worker_table.shown()
    assert len(shown) == MOST_ROWS
    assert "w-1999" in shown
    worker_table.update({}, [], 1.0)
    assert len(worker_table.rows) == MOST_GONE


WHOLE = b"whole"


async def test_a_viewer_gets_everything_once_and_then_what_changes() -> None:
    feed = Feed(2, lambda: WHOLE)
    events = feed.join()
    assert await anext(events) == WHOLE
    feed.publish(b"1")
    feed.publish(b"2")
    assert await anext(events) == b"12"


async def test_a_viewer_that_does_not_read_starts_afresh_and_holds_nothing() -> None:
    feed = Feed(1, lambda: WHOLE)
    events = feed.join()
    await anext(events)
    for _ in range(STALE_ROUTER_CODES + 1):
        feed.publish(b"old")
    feed.publish(b"older than the whole that comes next")
    assert await anext(events) == WHOLE
    feed.publish(b"new")
    assert await anext(events) == b"new"


async def test_viewers_above_the_limit_are_refused_until_one_leaves() -> None:
    feed = Feed(1, lambda: WHOLE)
    events = cast(Any, feed.join())
    await anext(events)
    with pytest.raises(SluiceError, match="--ui-viewers"):
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
    explanations.keep("r", Route("w-40", scores=scores))
    assert explanations.last is not None
    assert explanations.last.candidates == 50
    shown = [one.worker for one in explanations.last.scores]
    assert len(shown) == MOST_SCORES
    assert (shown[0], shown[-1]) == ("w-0", "w-40")


def app(view: LiveView | None) -> httpx.AsyncClient:
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


async def test_live_view_switched_off_returns_404() -> None:
    async with app(None) as client:
        for path in ("/ui", "/ui/", "/ui/main.js", DATA + "/state", DATA + "/stream"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "ui_off")


def test_no_file_names_another_host_and_modules_import_what_is_there() -> None:
    files = page_files()
    assert {"index.html", "main.js", "style.css"} <= set(files)
    for name, file in files.items():
        text = file.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE), name
        assert not re.search(r"\bstyle=|\son[a-z]+=\"|innerHTML|\beval\b", text), name
        for imported in re.findall(r'from "\./([^"]+)"', text):
            assert imported in files, f"{name} imports {imported}"


def test_without_a_key_only_the_page_is_open() -> None:
    assert all(LIVE_PAGE.fullmatch(path) for path in ("/ui", "/ui/", *(f"/ui/{name}" for name in page_files())))
    closed = (DATA + "/state", DATA + "/stream", DATA + "/requests/x", "/uix", "/ui//data/state", "/ui/data/")
    assert not any(LIVE_PAGE.fullmatch(path) for path in closed)
