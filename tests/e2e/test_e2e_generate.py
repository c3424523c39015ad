"""POST /inference/v1/generate: token ids in, token ids out."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.support.servers.suite import Suite

PATH = "/inference/v1/generate"


@pytest.fixture(scope="module")
def ids(suite: Suite) -> list[int]:
    found: list[int] = httpx.post(f"{suite.url}/tokenize", json={"prompt": "The river rises"}).json()["tokens"]
    return found


def generate(suite: Suite, **fields: Any) -> httpx.Response:
    return httpx.post(f"{suite.url}{PATH}", json={"model": "tekken", **fields}, timeout=60)


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_generated_ids_are_those_of_a_completion(suite: Suite, client: openai.OpenAI, ids: list[int]) -> None:
    sampling: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "seed": 3}
    plain: Any = client.completions.create(
        model="tekken", prompt=ids, **sampling, extra_body={"return_token_ids": True}
    )
    answer = generate(suite, token_ids=ids, sampling_params=sampling, request_id="mine").json()
    choice = answer["choices"][0]
    assert choice["token_ids"] == plain.choices[0].token_ids
    assert (answer["request_id"], choice["finish_reason"], len(choice["token_ids"])) == ("mine", "length", 12)
    assert "text" not in choice
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert (answer["prompt_logprobs"], answer["kv_transfer_params"], choice["logprobs"]) == (None, None, None)


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"stop": ["a"]}, {"logprobs": 2}])
def test_streamed_ids_are_those_of_the_whole_answer(suite: Suite, ids: list[int], more: dict[str, Any]) -> None:
    sampling = {"max_tokens": 40, "temperature": 0, **more}
    whole = generate(suite, token_ids=ids, sampling_params=sampling).json()
    answer = generate(
        suite, token_ids=ids, sampling_params=sampling, stream=True, stream_options={"include_usage": True}
    )
    streamed: dict[int, list[int]] = {}
    logprobs: dict[int, list[Any]] = {}
    finishes: dict[int, str] = {}
    *events, last = chunks(answer)
    for event in events:
        for choice in event["choices"]:
            streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
            logprobs.setdefault(choice["index"], []).extend((choice["logprobs"] or {}).get("content", []))
            if choice["finish_reason"]:
                finishes[choice["index"]] = choice["finish_reason"]
    for choice in whole["choices"]:
        assert streamed[choice["index"]] == choice["token_ids"]
        assert finishes[choice["index"]] == choice["finish_reason"]
        assert logprobs[choice["index"]] == (choice["logprobs"] or {}).get("content", [])
    assert last["choices"] == []
    assert last["usage"] == whole["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}


def test_logprobs_name_tokens_by_id(suite: Suite, ids: list[int]) -> None:
    sampling = {"max_tokens": 3, "temperature": 0, "logprobs": 1, "prompt_logprobs": 1}
    answer = generate(suite, token_ids=ids, sampling_params=sampling).json()
    choice = answer["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{x}" for x in choice["token_ids"]]
    assert len(answer["prompt_logprobs"]) == len(ids)


def test_max_tokens_left_out_generates_as_many_as_a_chat_would(suite: Suite, ids: list[int]) -> None:
    sampling = {"temperature": 0, "stop_token_ids": [], "ignore_eos": False}
    answer = generate(suite, token_ids=ids, sampling_params=sampling).json()
    assert len(answer["choices"][0]["token_ids"]) > 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
        ({"token_ids": [1, -1]}, "token_ids"),
        ({"token_ids": [[1]]}, "token_ids"),
        ({"sampling_params": {"temperature": 9}}, "sampling_params.temperature"),
        ({"sampling_params": {"model": "x"}}, "sampling_params.model"),
        ({"sampling_params": {"n": 1_000}}, "sampling_params.n"),
        ({"sampling_params": {"min_tokens": 9, "max_tokens": 3}}, "sampling_params.min_tokens"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"max_tokens": 10**9}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"output_kind": 7}}, "sampling_params.output_kind"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "sampling_params.prompt_logprobs"),
        ({"sampling_params": None}, "sampling_params"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"multi_modal_data": {"image": []}}, "multi_modal_data"),
        ({"media": []}, "media"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"stream_options": {}}, "stream_options"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_wrong_field_is_refused_by_the_clients_name(
    suite: Suite, ids: list[int], fields: dict[str, Any], param: str
) -> None:
    answer = generate(suite, **{"token_ids": ids, "sampling_params": {}, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
