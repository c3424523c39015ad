"""What a request's options become before any tensor is touched."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.contract.generation import SamplingParams, StructuredOutput
from services.worker.engines.transformers.sampling import History, SamplingPlan, plan_of
from tests.support.fakes.engines import request

EOS = (1, 2)
UNSET = SamplingParams()


def plan(defaults: dict[str, Any] | None = None, sampling: SamplingParams = UNSET, **fields: Any) -> SamplingPlan:
    return plan_of(request(sampling=sampling, **fields), defaults or {}, EOS)


def test_unset_options_take_the_models_defaults_then_plain_values() -> None:
    assert plan() == SamplingPlan(stop_ids=EOS)
    made = plan({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "min_p": None})
    assert (made.temperature, made.top_p, made.top_k, made.repetition_penalty, made.min_p) == (0.6, 0.9, 20, 1.1, 0.0)


def test_what_is_asked_for_beats_the_defaults() -> None:
    made = plan({"temperature": 0.6, "top_k": 20}, SamplingParams(temperature=0.0, top_k=-1))
    assert made.greedy
    assert made.top_k == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {1, 2}),
        ({"stop_token_ids": frozenset({1, 7})}, {1, 7}),
        ({"stop_token_ids": frozenset({1, 7}), "eos_token_ids": (1,), "ignore_eos": True}, {7}),
        ({"eos_token_ids": (9,)}, {1, 2, 9}),
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "guided": StructuredOutput("regex", "a+")}, {1, 2}),
    ],
)
def test_stop_ids(fields: dict[str, Any], expected: set[int]) -> None:
    assert set(plan(**fields).stop_ids) == expected


def test_a_plan_knows_what_it_needs() -> None:
    assert not plan().edits_logits
    assert plan(min_tokens=2).edits_logits
    assert plan(sampling=SamplingParams(presence_penalty=0.5)).penalises
    assert plan(sampling=SamplingParams(top_p=0.5)).narrows
    assert not plan(sampling=SamplingParams(top_p=1.0, top_k=0, min_p=0.0)).narrows


@given(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9)), st.integers(0, 5))
def test_history_counts_output_and_sees_everything(prompt: list[int], output: list[int], resumed: int) -> None:
    resumed = min(resumed, len(prompt))
    history = History(prompt, resumed)
    for token_id in output:
        history.add(token_id)
    counted = [*prompt[len(prompt) - resumed :], *output]
    assert history.output == counted
    assert history.counts == {token_id: counted.count(token_id) for token_id in set(counted)}
    assert history.seen == {*prompt, *output}
    assert history.generated == len(output)


def test_bad_words_ban_the_token_that_would_complete_them() -> None:
    history = History([5, 6])
    words = ((4,), (5, 6), (6, 7, 8))
    assert history.banned(words) == {4}
    history.add(5)
    assert history.banned(words) == {4, 6}
    history.add(6)
    history.add(7)
    assert history.banned(words) == {4, 8}
