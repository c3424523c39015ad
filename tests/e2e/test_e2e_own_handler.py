"""A handler that answers by itself, written with `sluice.stages` alone in a test's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.servers.suite import Suite

HANDLER = """
import json
import os

from sluice.stages import AnsweredGeneration, Finish, FinishReason, invalid


class Canned:
    def __init__(self, config, components):
        self.cards = {}

    async def on_model(self, worker):
        card = {"source": worker.source, "processor": worker.processor, "engine": worker.engine}
        with open(os.environ["CARD_FILE"], "w") as file:
            json.dump({**card, "blocks": worker.total_blocks}, file)

    async def start(self, request, sinks):
        if request.stop.max_tokens == 1:
            raise invalid("One token is not enough.", param="max_tokens")
        for index, sink in enumerate(sinks):
            sink.text(f"canned {index}")
            sink.finish(Finish(FinishReason.STOP, completion_tokens=2))
        tokens = 2 * len(sinks)
        return AnsweredGeneration(prompt_tokens=7, completion_tokens=tokens, choices=len(sinks), degraded={"canned"})
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Path]]:
    folder = tmp_path_factory.mktemp("handler")
    (folder / "canned.py").write_text(HANDLER)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {"PYTHONPATH": path, "CARD_FILE": str(folder / "card.json")}
    with (
        Suite("--workers", "1", "--handler", "canned:Canned", env=environment) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        yield client, folder / "card.json"


CHAT = {"model": "tekken", "messages": [{"role": "user", "content": "hi"}]}


def test_handler_that_answers_by_itself_has_usage_and_marks_in_every_api(suite: tuple[httpx.Client, Path]) -> None:
    client, _ = suite
    chat = client.post("/v1/chat/completions", json={**CHAT, "n": 2})
    assert chat.status_code == 200, chat.text
    body = chat.json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["canned 0", "canned 1"]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (7, 4)
    assert "canned" in chat.headers["x-sluice-degraded"]
    detailed = client.post("/v1/chat/completions", json={**CHAT, "logprobs": True})
    assert detailed.status_code == 200, detailed.text
    message = client.post("/v1/messages", json={**CHAT, "max_tokens": 9}).json()
    assert (message["content"][0]["text"], message["usage"]["input_tokens"]) == ("canned 0", 7)
    response = client.post("/v1/responses", json={"model": "tekken", "input": "hi"}).json()
    assert (response["usage"]["input_tokens"], response["usage"]["output_tokens"]) == (7, 2)


def test_handler_that_answers_by_itself_streams_and_refuses(suite: tuple[httpx.Client, Path]) -> None:
    client, _ = suite
    streamed = client.post(
        "/v1/chat/completions", json={**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    )
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert chunks[-1]["usage"]["prompt_tokens"] == 7
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1]) == "canned 0"
    refused = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_handler_is_notified_of_a_model_with_its_whole_card_before_its_first_request(
    suite: tuple[httpx.Client, Path],
) -> None:
    client, card = suite
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    seen = json.loads(card.read_text())
    assert seen["engine"] == "mock"
    assert seen["source"]
    assert (seen["processor"], seen["blocks"] > 0) == ("mistral", True)
