"""What SGLang's stream becomes, chunk by chunk; no SGLang takes part."""

from __future__ import annotations

import asyncio
import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind
from services.worker.contract.generation import FinishReason
from services.worker.engines.inprocess.request_state import LOWEST_LOGPROB
from services.worker.engines.sglang.children import ChildWatch
from services.worker.engines.sglang.events import EventFeeds
from services.worker.engines.shared.sglang_request_state import RequestState, abort_error, positions
from tests.support.fakes.engines import RecordingSink, request
from tests.support.waiting import until

STOPPED = {"type": "stop", "matched": 9}
LENGTH = {"type": "length", "length": 3}


def chunk(token_ids: list[int], completed: int, finish: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    reported = {"completion_tokens": completed, "cached_tokens": 2, "finish_reason": finish, **meta}
    return {"output_ids": token_ids, "meta_info": reported}


def flown(*chunks: dict[str, Any], handoff: bytes | None = None, skip: int = 0, **fields: Any) -> RecordingSink:
    sink = RecordingSink()
    state = RequestState(request(**fields), "rid", sink, handoff, skip)
    for one in chunks:
        state.take(one)
    return sink


def test_tokens_then_the_end() -> None:
    sink = flown(chunk([5], 1), chunk([6, 7], 3, LENGTH))
    assert sink.calls == ["begin", "push", "push", "finish"]
    assert sink.token_ids.tolist() == [5, 6, 7]
    assert sink.cached_tokens == 2
    assert sink.reason is FinishReason.LENGTH
    assert sink.usage is not None
    assert (sink.usage.prompt_tokens, sink.usage.completion_tokens, sink.usage.cached_tokens) == (4, 3, 2)


def test_stop_token_id_is_reported() -> None:
    sink = flown(chunk([5, 9], 2, STOPPED))
    assert (sink.reason, sink.stop_token_id) == (FinishReason.STOP, 9)
    assert flown(chunk([5], 1, {"type": "stop", "matched": "text"})).stop_token_id == 5


def test_with_ignore_eos_other_stop_ids_still_end_it_after_the_least_number() -> None:
    fields: dict[str, Any] = {"ignore_eos": True, "stop_token_ids": frozenset({1, 7}), "eos_token_ids": (1,)}
    sink = flown(chunk([1, 7, 8], 3), chunk([9], 4, LENGTH), **fields)
    assert sink.token_ids.tolist() == [1, 7]
    assert (sink.reason, sink.stop_token_id) == (FinishReason.STOP, 7)
    assert sink.calls.count("finish") == 1
    later = flown(chunk([7], 1), chunk([7, 7], 3), min_tokens=2, **fields)
    assert later.token_ids.tolist() == [7, 7, 7]
    assert later.reason is FinishReason.STOP


def test_an_abort_tells_no_token_a_second_time() -> None:
    sink = flown(chunk([5], 1), chunk([5], 1, {"type": "abort", "message": "gone"}))
    assert sink.token_ids.tolist() == [5]
    assert sink.reason is FinishReason.ERROR


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (400, ErrorKind.INVALID_ARGUMENT, False),
        (503, ErrorKind.OVERLOADED, False),
        (500, ErrorKind.INTERNAL, False),
        (None, ErrorKind.STREAM_INCOMPLETE, True),
    ],
)
def test_aborts_by_kind(status: int | None, kind: ErrorKind, retryable: bool) -> None:
    error = abort_error({"type": "abort", "message": "why", "status_code": status})
    assert (error.kind, error.retryable) == (kind, retryable)
    assert "why" in error.message


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(0, 3))
def test_any_split_tells_the_same_tokens_once(sizes: list[int], skip: int) -> None:
    """Also where a chunk repeats the end of the one before."""
    total = sum(sizes)
    tokens = list(range(100, 100 + total))
    chunks, done = [], 0
    for size in sizes:
        done += size
        overlap = min(1, done - size)
        chunks.append(chunk(tokens[done - size - overlap : done], done, LENGTH if done == total else None))
    sink = flown(*chunks, skip=skip)
    assert sink.token_ids.tolist() == tokens[skip:]
    assert sink.calls[-1] == "finish"
    assert sink.usage is not None
    assert sink.usage.completion_tokens == max(total - skip, 0)


def test_a_prefill_ends_with_the_handoff_unless_it_is_the_whole_answer() -> None:
    assert flown(chunk([5], 1, LENGTH), handoff=b"h").reason is FinishReason.HANDOFF
    assert flown(chunk([5], 1, LENGTH), handoff=b"h", max_tokens=1).reason is FinishReason.LENGTH
    stopped = flown(chunk([5], 1, LENGTH), handoff=b"h", stop_token_ids=frozenset({5}))
    assert (stopped.reason, stopped.stop_token_id) == (FinishReason.STOP, 5)


def test_logprobs_follow_their_tokens() -> None:
    chosen = [(-0.5, 5, None), (-0.1, 6, None)]
    top = [[(-0.2, 4, None), (-0.5, 5, None), (-3.0, 8, None)], [(-0.1, 6, None)]]
    found = positions(chosen, top, 2)
    assert [(one.chosen.token_id, one.chosen.logprob, one.chosen.rank) for one in found] == [(5, -0.5, 2), (6, -0.1, 1)]
    assert [[one.token_id for one in position.top] for position in found] == [[4, 5], [6]]
    assert positions([(None, 3, None)], [None], 2)[0].top == ()


def test_the_first_token_of_a_prompt_has_none() -> None:
    chosen = positions([(None, 3, None)], [], 0)[0].chosen
    assert (chosen.token_id, chosen.logprob, chosen.rank) == (3, 0.0, 0)


def test_impossible_logprob_is_the_smallest_json_number() -> None:
    found = positions([(-math.inf, 3, None)], [[(-math.inf, 4, None)]], 1)[0]
    assert (found.chosen.logprob, found.top[0].logprob) == (LOWEST_LOGPROB, LOWEST_LOGPROB)


def test_events_stay_on_this_machine() -> None:
    alone, several = EventFeeds(1), EventFeeds(3)
    try:
        assert '"ipc://' in alone.config
        assert several.config.count("tcp://127.0.0.1:") == 2
        assert alone.sources == ()
    finally:
        alone.close()
        alone.close()
        several.close()


async def test_the_death_of_a_child_is_noticed() -> None:
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    children = [await asyncio.create_subprocess_exec(*command) for _ in range(2)]
    died: list[int] = []
    watch = ChildWatch([child.pid for child in children], died.append)
    try:
        children[1].kill()
        await until(lambda: died)
        assert died == [children[1].pid]
    finally:
        watch.close()
        watch.close()
        children[0].kill()
        for child in children:
            await child.wait()
