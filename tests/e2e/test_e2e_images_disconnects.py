"""Clients that disconnect while their images are fetched: the fetch ends soon after, long before its own limit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.security.test_security_media import running_host
from tests.support.data.tiny_vlm import build_qwen2_vl
from tests.support.servers.loose_suite import LooseSuite
from tests.support.servers.media_host import MediaHost
from tests.support.servers.scripted_names import EXEMPT, SCRIPTED_NAMES, write_script
from tests.support.waiting import until

LIMIT_S = 120
SOON_S = 40.0
URL = "https://media.test:PORT/silent"
OPENAI = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]}
ANTHROPIC = {
    "max_tokens": 8,
    "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": URL}}]}],
}
RESPONSES = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]}


async def _silent(writer: asyncio.StreamWriter) -> None:
    while not writer.is_closing():  # noqa: ASYNC110
        await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LooseSuite, MediaHost]]:
    folder = tmp_path_factory.mktemp("media")
    with pytest.MonkeyPatch.context() as patch, running_host() as (host, _):
        write_script(folder / "names.json", host.authority, {"media.test": [[EXEMPT]]})
        patch.setenv(SCRIPTED_NAMES, str(folder / "names.json"))
        patch.setenv("SLUICE_PREPROCESS_MEDIA_HOSTS", f"media.test:{host.port}")
        patch.setenv("SLUICE_PREPROCESS_MEDIA_FETCH_S", str(LIMIT_S))
        host.answers["/silent"] = _silent
        flags = ("--tokenize-timeout-s", str(2 * LIMIT_S), "--request-timeout-s", str(4 * LIMIT_S))
        through = "tests.support.servers.scripted_names"
        model = build_qwen2_vl(folder / "model")
        with LooseSuite(model, workers=1, postprocess=1, gateway_flags=flags, through=through) as running:
            yield running, host


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", OPENAI),
        ("/v1/chat/completions", {**OPENAI, "stream": True}),
        ("/v1/messages", ANTHROPIC),
        ("/v1/messages", {**ANTHROPIC, "stream": True}),
        ("/v1/responses", RESPONSES),
    ],
)
async def test_fetch_ends_when_its_client_disconnects(
    suite: tuple[LooseSuite, MediaHost], path: str, fields: dict[str, Any]
) -> None:
    running, host = suite
    preprocess = psutil.Process(running.pid("preprocess"))

    def fetches() -> bool:
        return any(found.raddr and found.raddr.port == host.port for found in preprocess.net_connections())

    assert not fetches()
    before = len(host.requests)
    body = json.dumps({"model": "tiny", **fields}).replace("PORT", str(host.port)).encode()
    lines = ("host: 127.0.0.1", "content-type: application/json", f"content-length: {len(body)}")
    head = "\r\n".join((f"POST {path} HTTP/1.1", *lines, "", ""))
    _, writer = await asyncio.open_connection(*running.address("gateway").split(":"))
    writer.write(head.encode() + body)
    await until(lambda: len(host.requests) > before, SOON_S)
    assert fetches()
    writer.close()
    await until(lambda: not fetches(), SOON_S)
