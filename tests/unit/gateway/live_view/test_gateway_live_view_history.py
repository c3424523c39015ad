"""The live view's books: nothing is counted twice, and nothing grows."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.common.types.media.spans import MediaFile, MediaKind, MediaSpan
from services.gateway.apis.live_view.rates import HISTORY_SAMPLES, RateMeter
from services.gateway.apis.live_view.request_history import MAX_NEW, MAX_REASONS, MAX_RECENT, RequestHistory
from services.gateway.apis.live_view.worker_table import MAX_REMOVED, MAX_ROWS, LinkState, WorkerTable, hit_rates
from services.gateway.backends.workers.overview import WorkerState
from services.gateway.core.context import NO_CONTEXT, PromptTimes, RequestContext
from services.gateway.core.request import (
    Finish,
    FinishReason,
    GenerationRequest,
    PromptMedia,
    SamplingParams,
    StopParams,
    TextPrompt,
    TokenizedPrompt,
)
from services.gateway.streams.interfaces import CANCELLED, StreamEnd
from services.gateway.streams.manager import NO_RECOVERY
from services.gateway.streams.stream import GenerationStream

FINISHED = StreamEnd(Finish(FinishReason.STOP))
STALLED = StreamEnd(error=SluiceError(ErrorKind.RESPONSE_TIMEOUT, "Stalled.", code="stalled"))
PROMPT = TokenizedPrompt(b"\1\0\0\0" * 8, b"", "", b"", b"", 100, b"")


def stream(slot: int, worker: str = "w", index: int = 0, context: RequestContext = NO_CONTEXT) -> GenerationStream:
    request = GenerationRequest(f"r-{slot}", "m", TextPrompt("x"), 2, SamplingParams(), StopParams())
    made = GenerationStream(slot, request, index, PROMPT, 100, cast(Any, None), context, NO_RECOVERY)
    made.worker = cast(Any, SimpleNamespace(worker_id=worker))
    return made


def ended(
    request_history: RequestHistory, slot: int, end: StreamEnd = FINISHED, worker: str = "w", cached: int = 0
) -> None:
    one = stream(slot, worker)
    request_history.on_assigned(one, worker)
    one.tokens.extend((1, 2))
    one.cached_tokens = cached
    request_history.on_ended(one, end)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["begin", "tokens", "look", "move", "end"])), max_size=80))
def test_totals_of_any_sequence_equal_the_sum_of_the_streams(steps: list[tuple[int, str]]) -> None:
    request_history, live, tokens, begun, over = RequestHistory(), dict[int, GenerationStream](), 0, 0, 0
    for slot, step in steps:
        one = live.get(slot)
        if step == "begin" and one is None:
            live[slot] = stream(slot)
            request_history.on_assigned(live[slot], "w")
            begun += 1
        elif step == "look":
            request_history.meter()
        elif one is not None and step == "tokens":
            one.tokens.extend((1, 2, 3))
            tokens += 3
        elif one is not None and step == "move":
            request_history.on_assigned(one, "other")
        elif one is not None and step == "end":
            request_history.on_ended(live.pop(slot), FINISHED)
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
    request_history.on_assigned(one, "w")
    request_history.on_ended(one, FINISHED)
    request_history.on_ended(one, CANCELLED)
    assert [done.outcome for done in request_history.recent] == ["finished"]
    assert request_history.totals.failed == 0


def test_a_year_takes_no_more_than_an_hour() -> None:
    request_history = RequestHistory()
    for slot in range(3 * MAX_RECENT):
        one = stream(slot)
        request_history.on_assigned(one, "w")
        one.degraded = (f"reason-{slot}",)
        request_history.on_ended(one, FINISHED)
    assert (len(request_history.recent), len(request_history.new), len(request_history.degraded)) == (
        MAX_RECENT,
        MAX_NEW,
        MAX_REASONS,
    )
    assert len(request_history.take_new()) == MAX_NEW
    assert request_history.take_new() == []


def test_stages_follow_each_other_and_the_first_choice_has_the_answers_id() -> None:
    request_history = RequestHistory()
    now = perf_counter()
    context = RequestContext(prompt_times=PromptTimes(now - 0.5, now - 0.3))
    one, other = stream(1, context=context), stream(2, index=1, context=context)
    one.first_text_at = one.started_at + 0.0001
    for each in (one, other):
        request_history.on_assigned(each, "w")
        request_history.on_ended(each, STALLED)
    done, second = request_history.recent
    assert (done.id, second.id) == ("r-1", "r-2-1")
    assert (round(done.tokenize_ms), round(done.route_ms), round(done.first_ms, 1)) == (200, 300, 0.1)
    assert request_history.totals.failed == 2


def test_items_of_a_request_are_cached_if_all_of_their_tokens_were() -> None:
    request_history, one = RequestHistory(), stream(1)
    spans = [
        MediaSpan(MediaKind.IMAGE, bytes(16), 1, 3, encoder_tokens=12),
        MediaSpan(MediaKind.IMAGE, bytes(16), 4, 3),
    ]
    media = tuple(PromptMedia(span, MediaFile(span.hash, b"")) for span in spans)
    one.prompt = replace(PROMPT, media=media)
    request_history.on_assigned(one, "w")
    one.cached_tokens = 6
    request_history.on_ended(one, FINISHED)
    (done,) = request_history.recent
    assert (done.media, done.cached_media, done.encoder_tokens) == (2, 1, 15)


def test_rates_are_what_came_in_a_second() -> None:
    request_history, meter = RequestHistory(), RateMeter()
    ended(request_history, 1)
    ended(request_history, 2, STALLED)
    rates = meter.sample(request_history.totals, 7, 2.0)
    assert (rates.requests, rates.failed, rates.output_tokens, rates.prompt_tokens, rates.live) == (1, 0.5, 2, 8, 7)
    for _ in range(2 * HISTORY_SAMPLES):
        assert meter.sample(request_history.totals, 0, 1.0).requests == 0
    assert len(meter.history) == HISTORY_SAMPLES


def test_hit_rates_are_of_finished_prompts() -> None:
    request_history = RequestHistory()
    ended(request_history, 1, worker="a", cached=8)
    ended(request_history, 2, worker="a", cached=4)
    ended(request_history, 3, CANCELLED, worker="b", cached=8)
    assert hit_rates(list(request_history.recent)) == {"a": 0.75}


def link(connected: bool = True, healthy: bool = True) -> LinkState:
    return LinkState("127.0.0.1:1", "m", connected, healthy, 0)


def test_a_worker_that_vanishes_is_red_for_a_minute() -> None:
    now = 100.0
    worker_table = WorkerTable(RequestHistory(), lambda: now)
    worker_table.update({"a": link(), "b": link(healthy=False), "c": link(connected=False)}, [], 1.0)
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


def test_worker_set_aside_is_a_row_with_its_reason() -> None:
    state = WorkerState(
        "a", "h:1", "m", "aggregated", "http", "", False, "name_pinned", 0, 0, 0, 0, 0, 0.0, 0, 0.0, 0.0
    )
    worker_table = WorkerTable(RequestHistory())
    worker_table.update({}, [state], 1.0)
    row = worker_table.rows["a"]
    assert (row.health, row.why, row.model) == ("aside", "name_pinned", "m")


def test_thousands_of_workers_do_not_fill_the_page_and_those_in_trouble_are_shown() -> None:
    worker_table = WorkerTable(RequestHistory())
    links = {f"w-{number:04}": link(connected=number != 1999) for number in range(2000)}
    worker_table.update(links, [], 1.0)
    shown = worker_table.shown()
    assert len(shown) == MAX_ROWS
    assert "w-1999" in shown
    worker_table.update({}, [], 1.0)
    assert len(worker_table.rows) == MAX_REMOVED
