"""The vllm engine behind the suite: constraints it cannot compile, adapters loaded again, first log-probabilities."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.engines.served_suite import ServedModel, served
from tests.engines.test_engines_vllm import describe
from tests.engines.vllm_cases import NOT_COMPILED
from tests.support.data.tiny_models import ServableFolders, build_servable

pytestmark = pytest.mark.engines

PROMPT = list(range(100, 100 + 5 * 32))
WORKER = ("--canary-s", "1")
LOGPROBS_S = 15
"""Seconds within which the first log-probabilities come, which vLLM compiles code for; that alone takes a minute."""


async def test_vllm_behind_the_suite(tmp_path: Path) -> None:
    folders = build_servable(tmp_path)
    engine = describe(folders.model)
    flags = (*WORKER, "--adapters", f"formal={folders.adapter}", "--", "--max-loras", "2")
    async with served(engine, {"worker": flags}) as model:
        await _first_logprobs_delay_nothing(model)
        await _constraints_that_are_not_compiled_are_refused(model)
        await _adapter_loaded_again_is_the_new_one(model, folders, tmp_path / "verse")


async def _first_logprobs_delay_nothing(model: ServedModel) -> None:
    began = time.monotonic()
    answer = await model.complete(PROMPT, 4, logprobs=3)
    assert time.monotonic() - began < LOGPROBS_S
    assert len(answer["choices"][0]["logprobs"]["top_logprobs"]) == 4
    assert [line for line in model.workers["worker"].log if "canary" in line] == []


async def _constraints_that_are_not_compiled_are_refused(model: ServedModel) -> None:
    for constraint in NOT_COMPILED:
        for stream in (False, True):
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "stream": stream}
            answer = await model.client.post("/v1/completions", json={**body, "structured_outputs": constraint})
            assert answer.status_code == 400, (constraint, stream, answer.text)
            assert answer.json()["error"]["param"] == "structured_outputs." + next(iter(constraint))
    assert (await model.complete(PROMPT, 4))["usage"]["completion_tokens"] == 4


async def _adapter_loaded_again_is_the_new_one(model: ServedModel, folders: ServableFolders, folder: Path) -> None:
    async def complete(name: str) -> tuple[str, int]:
        answer = await model.complete(PROMPT, 12, model=name)
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def load(name: str) -> None:
        await model.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(folder))

    shutil.copytree(folders.adapter, folder)
    await load("verse")
    (old, first), (again, second) = await complete("verse"), await complete("verse")
    assert (again, first > 0, second > 0) == (old, False, True)
    await model.post("/v1/unload_lora_adapter", lora_name="verse")
    shutil.copytree(folders.second_adapter, folder, dirs_exist_ok=True)
    await load("verse")
    new, cached = await complete("verse")
    assert cached == 0
    assert new != old
    await model.post("/v1/unload_lora_adapter", lora_name="verse")
    await load("fresh")
    assert (await complete("fresh"))[0] == new
    await model.post("/v1/unload_lora_adapter", lora_name="fresh")
    await load("verse")
    await model.post("/v1/unload_lora_adapter", lora_name="verse")
    gone = await model.client.post("/v1/completions", json={"model": "verse", "prompt": PROMPT})
    assert gone.status_code == 404, gone.text
