"""Tokens over HTTP, as a client of the whole suite sees them."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest

from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.tokenizers.probes import prompt_fingerprint
from tests.support.data.loaded_tokenizers import small_tokenizer
from tests.support.servers.suite import Suite

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße 😀 </s> [INST]"}]


@pytest.fixture
def client(suite: Suite) -> httpx.Client:
    return httpx.Client(base_url=suite.url, timeout=60)


def test_a_chat_has_the_ids_that_its_completion_uses(client: httpx.Client) -> None:
    body: dict[str, Any] = {"model": "tekken", "messages": MESSAGES}
    answer = client.post("/tokenize", json=body).json()
    assert answer["tokens"] == small_tokenizer().encode_chat(ChatRequest(MESSAGES))
    assert answer["count"] == len(answer["tokens"])
    completion = client.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json()
    assert completion["usage"]["prompt_tokens"] == answer["count"]
    rendered = client.post("/v1/chat/completions/render", json={**body, "max_tokens": 1}).json()
    assert rendered["token_ids"] == answer["tokens"]
    assert rendered["prompt"] == small_tokenizer().render(ChatRequest(MESSAGES))
    assert rendered["sampling_params"]["max_tokens"] == 1


def test_text_survives_the_way_to_ids_and_back(client: httpx.Client) -> None:
    text = "Grüße 😀 你好\n\n"
    body = {"model": "tekken", "prompt": text, "add_special_tokens": False, "return_token_strs": True}
    answer = client.post("/tokenize", json=body).json()
    assert answer["tokens"] == small_tokenizer().encode_text(text, add_special_tokens=False)
    assert answer["token_strs"][0] == small_tokenizer().decode(answer["tokens"][:1])
    assert len(answer["token_strs"]) == answer["count"]
    back = client.post("/detokenize", json={"model": "tekken", "tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}
    special = client.post("/detokenize", json={"model": "tekken", "tokens": [1, 2]})
    assert special.json() == {"prompt": "<s></s>"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"model": "nope", "prompt": "x"}, 404, "model"),
        ("/tokenize", {"model": "tekken", "messages": [{"role": "robot", "content": ""}]}, 400, "messages[0].role"),
        ("/tokenize", {"model": "tekken", "messages": MESSAGES, "chat_template": "x"}, 400, "chat_template"),
        ("/detokenize", {"model": "tekken", "tokens": [10**7]}, 400, "tokens"),
        (
            "/v1/chat/completions/render",
            {"model": "tekken", "messages": [{"role": "user"}]},
            400,
            "messages[0].content",
        ),
    ],
)
def test_mistakes_are_openai_errors(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")


def test_a_models_entry_says_whose_ids_it_gets(client: httpx.Client) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    fingerprint = small_tokenizer().facts.fingerprint
    prompts = model["tokenizer"].pop("prompt_fingerprint")
    assert prompts == prompt_fingerprint(small_tokenizer())
    assert model["tokenizer"].pop("template") == orjson.loads(orjson.dumps(small_tokenizer().facts.template))
    assert model["tokenizer"] == {
        "parity": "same_prompts",  # the worker has made them too
        "media_parity": "unknown",  # the worker takes no images
        "processor": "mistral",
        "fingerprint": fingerprint,
        "worker_fingerprints": [fingerprint],
        "worker_prompt_fingerprints": [prompts],
    }
    assert "sluice_gateway_tokenizer_parity{" in client.get("/metrics").text


def test_what_is_no_json_is_refused(client: httpx.Client) -> None:
    for path in ("/tokenize", "/detokenize", "/v1/chat/completions/render"):
        answer = client.post(path, content=b'{"model": "tekken", "prompt": "\\ud800"}')
        assert answer.status_code == 400
        assert "not valid JSON" in answer.json()["error"]["message"]
        assert client.get(path).status_code == 405
