"""`prompt_embeds` of /v1/completions through the whole suite to vLLM, of two workers the one that takes them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.engines import engine_suite as suite
from tests.engines.engine_list import ENGINES
from tests.engines.served_suite import GREEDY, ServedModel, served
from tests.support.data.tiny_models import build_servable

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module")]

MADE = 24
PROMPTS = [*suite.prompts(5), *suite.prompts(1, 1, 1, seed=2), *suite.prompts(2, 100, 100, seed=3)]
"""The last two are longer than three blocks."""
GARBAGE = {
    "no_base64": "%%% no base64 %%%",
    "text": base64.b64encode(b"neither this nor that").decode(),
    "zip_cut_off": base64.b64encode(b"PK\x03\x04 and nothing more").decode(),
    "nothing": "",
}
REFUSED = (
    *GARBAGE,
    *("narrow", "wide", "not_finite", "turned", "whole_numbers", "vector", "list", "sparse", "old_format", "too_long"),
    *("trap", "trap_beside", "trap_alone"),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServedModel]:
    engine = ENGINES["vllm"](build_servable(tmp_path_factory.mktemp("servable")).model)
    async with served(engine, {"with": ("--", "--enable-prompt-embeds"), "without": ()}) as started:
        yield started


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a file appears when a pickle among the fields is run."""
    return tmp_path_factory.mktemp("trap")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fields(running: ServedModel, trap: Path) -> dict[str, Any]:
    """Values of `prompt_embeds`, see made_prompt_embeds."""
    maker = replace(running.engine, offline=("-P", str(Path(__file__).with_name("made_prompt_embeds.py"))))
    return {**await suite.offline(maker, {"prompts": PROMPTS, "trap": str(trap / "sprung")}), **GARBAGE}


async def ask(running: ServedModel, embeds: str, **more: Any) -> dict[str, Any]:
    body = {**GREEDY, "prompt_embeds": embeds, "max_tokens": MADE, "return_token_ids": True, **more}
    return await running.post("/v1/completions", **body)


def ids(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


async def test_output_for_prompt_embeds_equals_that_for_the_ids(running: ServedModel, fields: dict[str, Any]) -> None:
    expected = await asyncio.gather(*(running.complete(prompt, MADE) for prompt in PROMPTS))
    assert len({tuple(ids(answer)) for answer in expected}) == len(PROMPTS)
    answers = await asyncio.gather(*(ask(running, field) for field in fields["plain"]))
    for prompt, answer, wanted in zip(PROMPTS, answers, expected, strict=True):
        (choice,), (of_ids,) = answer["choices"], wanted["choices"]
        assert ids(answer) == ids(wanted)
        assert (choice["text"], choice["finish_reason"]) == (of_ids["text"], "length")
        assert not choice["prompt_token_ids"]
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] == MADE
        assert answer["usage"]["total_tokens"] == len(prompt) + MADE


async def test_streamed_response_equals_the_non_streamed_one(running: ServedModel, fields: dict[str, Any]) -> None:
    for prompt, field in zip(PROMPTS, fields["plain"], strict=True):
        wanted = await ask(running, field)
        body = {**GREEDY, "prompt": "", "prompt_embeds": field, "max_tokens": MADE, "return_token_ids": True}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        async with running.client.stream("POST", "/v1/completions", json=body | stream) as answer:
            assert answer.status_code == 200
            said = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
        assert said.pop() == "[DONE]"
        chunks = [json.loads(line) for line in said]
        parts = [choice for chunk in chunks for choice in chunk["choices"]]
        assert [token for part in parts for token in part.get("token_ids") or ()] == ids(wanted)
        assert "".join(part["text"] for part in parts) == wanted["choices"][0]["text"]
        assert chunks[-1]["usage"]["prompt_tokens"] == len(prompt)
        assert chunks[-1]["usage"]["completion_tokens"] == MADE


async def test_equal_embeddings_share_a_cache_and_others_do_not(running: ServedModel, fields: dict[str, Any]) -> None:
    salt = {"cache_salt": "of this test"}
    first, other = fields["plain"][-2:]
    once = await ask(running, first, **salt)
    again = await ask(running, first, **salt)
    assert ids(again) == ids(once)
    assert _cached(once) == 0
    assert _cached(again) >= 64
    assert _cached(await ask(running, other, **salt)) == 0


def _cached(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.parametrize("saved", ["batch", "part", "learnt", "double"])
async def test_prompt_embeds_in_other_file_layouts_are_equal(
    running: ServedModel, fields: dict[str, Any], saved: str
) -> None:
    assert ids(await ask(running, fields[saved])) == ids(await running.complete(PROMPTS[0], MADE))


@pytest.mark.parametrize("kind", ["half", "bfloat16"])
async def test_embeddings_of_lower_precision_are_accepted(
    running: ServedModel, fields: dict[str, Any], kind: str
) -> None:
    assert ids(await ask(running, fields[kind])) == ids(await ask(running, fields[f"{kind}_widened"]))


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 2},
        {"n": 2, "temperature": 1, "seed": 5},
        {"structured_outputs": {"choice": ["weather", "question"]}, "ignore_eos": False},
        {"logit_bias": {"30": 5}, "bad_words": ["fox"], "min_tokens": 3, "stop_token_ids": [40]},
    ],
    ids=["logprobs", "choices", "guided", "stopping"],
)
async def test_options_together_with_prompt_embeds(
    running: ServedModel, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    wanted = await running.complete(PROMPTS[0], MADE, **options)
    answer = await ask(running, fields["plain"][0], **options)
    for choice, of_ids in zip(answer["choices"], wanted["choices"], strict=True):
        assert (choice["token_ids"], choice["finish_reason"]) == (of_ids["token_ids"], of_ids["finish_reason"])


async def test_penalties_count_generated_tokens_only(running: ServedModel, fields: dict[str, Any]) -> None:
    """Not for those of a prompt that was in the same place of the engine's batch before."""
    plain = ids(await ask(running, fields["plain"][0]))
    for penalty in ({"repetition_penalty": 1.5}, {"presence_penalty": 1.0, "frequency_penalty": 1.0}):
        found = []
        for before in ([20] * 60, plain * 3, list(range(10, 400)), plain[:1] * 60):
            await asyncio.gather(*(running.complete(before, 2) for _ in range(8)))
            found.append(ids(await ask(running, fields["plain"][0], **penalty)))
        assert found == found[:1] * 4
        assert found[0][0] == plain[0], "nothing was said before it"


@pytest.mark.parametrize("case", REFUSED)
async def test_invalid_prompt_embeds_are_rejected(
    running: ServedModel, fields: dict[str, Any], trap: Path, case: str
) -> None:
    for stream in (False, True):
        body = {**GREEDY, "prompt_embeds": fields[case], "max_tokens": 4, "stream": stream}
        answer = await running.client.post("/v1/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
        assert error["param"] == "prompt_embeds"
        assert "Traceback" not in error["message"]
    assert await asyncio.to_thread(os.listdir, trap) == []
    assert ids(await ask(running, fields["plain"][0])) == ids(await running.complete(PROMPTS[0], MADE))


async def test_prompt_embeds_without_a_capable_worker_are_rejected(
    running: ServedModel, fields: dict[str, Any]
) -> None:
    """The last test of a suite, which has one worker afterwards."""
    await running.idle()
    worker = running.workers["with"].process
    worker.terminate()
    async with asyncio.timeout(suite.CALL_S):
        await worker.wait()
        while await running.known() != {"without"}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    for stream in (False, True):
        body = {**GREEDY, "prompt_embeds": fields["plain"][0], "max_tokens": 4, "stream": stream}
        answer = await running.client.post("/v1/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "prompt_embeds")
        assert "prompt_embeds" in error["message"]
    assert len(ids(await running.complete(PROMPTS[0], MADE))) == MADE
