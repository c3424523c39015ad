"""Media items in a gateway whose engines tokenize prompts, and in queries of the router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.common.base.errors import SluiceError
from services.common.rpc.media import read_spans
from services.common.types.media.parts import MediaInput
from services.common.types.media.spans import MediaFile, MediaKind, MediaSpan, content_hash
from services.gateway.backends.rpc.router import RouterClient
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core.request import ChatPrompt, PromptMedia
from services.gateway.pipeline.engine_preprocessing import EngineTokenizeStage
from sluice.v1 import router_pb2
from tests.support.fakes.streams import PROMPT, REQUEST

WORKER = WorkerEntry("w", "", 1, "m", 16, 100, 10, frozenset({"image", "messages"}), 0)
SPAN = MediaSpan(MediaKind.IMAGE, content_hash(b"a"), 1, 2, encoder_tokens=7)


async def test_engine_that_tokenizes_prompts_refuses_the_first_item_by_its_part() -> None:
    items = (MediaInput("messages[1].content[2]", MediaKind.IMAGE, data=b"a"),)
    with pytest.raises(SluiceError) as refused:
        await EngineTokenizeStage().tokenize(replace(REQUEST, prompt=ChatPrompt(b"[]", media=items)), WORKER)
    assert (refused.value.param, refused.value.code) == ("messages[1].content[2]", "media_not_supported")


@pytest.mark.parametrize("hashed", [True, False])
async def test_route_query_has_the_items_with_hashes_and_with_ids(hashed: bool) -> None:
    queries: list[router_pb2.RouteQueryRequest] = []

    async def call(method: Any, query: Any, timeout_s: float, hedge: str = "") -> router_pb2.RouteQueryResponse:
        queries.append(query)
        return router_pb2.RouteQueryResponse()

    client = RouterClient(["127.0.0.1:1"], None, 1.0)
    client.replicas.call = call  # type: ignore[method-assign, assignment]
    hashes = {"block_hashes": bytes(8), "hash_scheme": "sluice-xxh3-v1"} if hashed else {}
    prompt = replace(PROMPT, media=(PromptMedia(SPAN, MediaFile(SPAN.hash, b"a")),), **hashes)  # type: ignore[arg-type]
    await client.route("r-0", "m", prompt, 16)
    assert read_spans(queries[0].prompt.media) == (SPAN,)
    assert bool(queries[0].prompt.block_hashes) is hashed
