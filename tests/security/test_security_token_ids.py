"""Token ids outside the vocabulary, and words of too many tokens, are refused before any engine sees them, over every
API. (Findings F2 and A6.)"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.support.clients.honest_clients import HonestClients
from tests.support.servers.suite import Suite

UNKNOWN = 2_000_000
MODEL = {"model": "tekken"}
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
    "completion": ("/v1/completions", {**MODEL, "prompt": "hi", "max_tokens": 5}),
    "completion of ids": ("/v1/completions", {**MODEL, "prompt": [20, 21], "max_tokens": 5}),
}
FIELDS: dict[str, dict[str, Any]] = {
    "stop_token_ids": {"stop_token_ids": [UNKNOWN], "min_tokens": 1},
    "allowed_token_ids": {"allowed_token_ids": [20, UNKNOWN]},
    "logit_bias": {"logit_bias": {str(UNKNOWN): 1}},
}


@pytest.mark.parametrize("field", FIELDS)
async def test_token_id_outside_the_vocabulary_is_a_400_that_names_its_field(attacked: Suite, field: str) -> None:
    async with HonestClients(attacked.url, 10) as honest, httpx.AsyncClient(base_url=attacked.url, timeout=60) as http:
        for name, (path, body) in APIS.items():
            answer = await http.post(path, json={**body, **FIELDS[field]})
            assert answer.status_code == 400, name
            assert answer.json()["error"]["param"] == field, name
        sampling = {"max_tokens": 5, **FIELDS[field]}
        answer = await http.post(
            "/inference/v1/generate", json={**MODEL, "token_ids": [20, 21], "sampling_params": sampling}
        )
        assert answer.status_code == 400
        assert field in answer.json()["error"]["param"]
    honest.check()


async def test_bad_words_that_would_be_held_in_megabytes_are_a_400_that_names_them(attacked: Suite) -> None:
    """Their tokens are held beside the budget of bodies while the request runs, so 64 of 60 KB took 16 MB of memory."""
    words = {"bad_words": [f"{number} {'bad ' * 15_000}" for number in range(64)]}
    gateway = attacked.processes("gateway")[0]
    async with HonestClients(attacked.url, 10) as honest, httpx.AsyncClient(base_url=attacked.url, timeout=60) as http:
        before = gateway.memory_info().rss
        for name, (path, body) in APIS.items():
            answers = await asyncio.gather(*(http.post(path, json={**body, **words}) for _ in range(4)))
            assert {answer.status_code for answer in answers} == {400}, name
            assert {answer.json()["error"]["param"] for answer in answers} == {"bad_words"}, name
        assert gateway.memory_info().rss - before < 150 << 20
    honest.check()
