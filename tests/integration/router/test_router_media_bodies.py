"""OpenAI bodies with images: what preprocess receives, and what the router does with its response."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from services.common.base.errors import ErrorKind
from services.common.base.packing import pack_u64
from services.common.rpc.media import span_messages
from services.common.rpc.server import GrpcServer
from services.common.types.hashing import HASH_SCHEME, block_hashes
from services.common.types.media.spans import MediaKind, MediaSpan, content_hash
from services.preprocess.settings import PreprocessSettings
from services.router.rpc.preprocess import PreprocessBodies
from services.router.scheduling.queries import Prompt
from sluice.v1 import preprocess_pb2, preprocess_pb2_grpc, router_pb2
from tests.support.clients.callers import query, refused
from tests.support.servers.router_cluster import BLOCK, FakeWorker, RouterProcess, routers
from tests.support.waiting import until

TOKENS = list(range(100, 100 + 4 * BLOCK))
PICTURE = b"a picture" * 50_000


class Preprocess(preprocess_pb2_grpc.PreprocessServicer):
    """Answers every chat with the same tokens, of which a block stands for each of its media items."""

    def __init__(self) -> None:
        self.received: list[preprocess_pb2.TokenizeRequest] = []

    async def Tokenize(self, request: preprocess_pb2.TokenizeRequest, context: Any) -> preprocess_pb2.TokenizeResponse:
        self.received.append(request)
        spans = [
            MediaSpan(MediaKind.IMAGE, content_hash(item.data), (1 + index) * BLOCK, BLOCK)
            for index, item in enumerate(request.chat.media)
        ]
        hashes = block_hashes(TOKENS, BLOCK, media=spans)
        return preprocess_pb2.TokenizeResponse(
            block_hashes=pack_u64(hashes),
            hash_scheme=HASH_SCHEME,
            prompt_tokens=len(TOKENS),
            media=span_messages(spans),
        )


@pytest.fixture
async def preprocess() -> AsyncIterator[tuple[Preprocess, str]]:
    server = GrpcServer(PreprocessSettings(listen="127.0.0.1:0"), preprocess_pb2.DESCRIPTOR)
    servicer = Preprocess()  # type: ignore[abstract]  # has only the call that the router makes
    preprocess_pb2_grpc.add_PreprocessServicer_to_server(servicer, server.server)
    await server.start()
    await server.set_serving(True)
    yield servicer, f"127.0.0.1:{server.port}"
    await server.stop(0)


def body(url: str) -> router_pb2.PromptRef:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    return router_pb2.PromptRef(openai_body=json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())


async def attached(router: RouterProcess) -> FakeWorker:
    await router.ready()
    worker = FakeWorker("a")
    await worker.attach(router)
    worker.keep_beating()
    return worker


async def test_images_of_a_body_are_tokenized_and_counted(preprocess: tuple[Preprocess, str]) -> None:
    servicer, address = preprocess
    url = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
    async with routers(1, drain_s=5, preprocess=[address]) as (router,):
        await attached(router)

        async def routed() -> bool:
            try:
                await router.stub.RouteQuery(query(body(url), "r"))
            except grpc.aio.AioRpcError:
                return False
            return True

        await until(routed)
        (item,) = servicer.received[-1].chat.media
        assert (item.data, item.media_type, item.part) == (PICTURE, "", "messages[0].content[0]")
        assert json.loads(servicer.received[-1].chat.messages_json)[0]["content"][0] == {"type": "image", "media": 0}
        loads = await router.stub.GetLoads(router_pb2.GetLoadsRequest())
        assert [load.prefill_blocks for load in loads.loads] == [pytest.approx(4 + 1)]
        decisions = await router.stub.GetDecisions(router_pb2.GetDecisionsRequest())
        assert [decision.media_items for decision in decisions.decisions] == [1]
        broken = await refused(router.stub.RouteQuery(query(body("data:image/png;base64,%%%"))))
        assert (broken.kind, broken.code) == (ErrorKind.INVALID_ARGUMENT, "invalid_media")
        assert broken.param == "messages[0].content[0]"


@pytest.mark.parametrize(
    ("content", "waits"), [("What?", False), ([{"type": "image_url", "image_url": "https://a.test/"}], True)]
)
async def test_timeouts_count_against_preprocess_only_without_images(content: Any, waits: bool) -> None:
    bodies = PreprocessBodies([], None, 5.0)
    calls: list[bool] = []

    async def call(method: Any, request: Any, timeout_s: float, *, waits: bool) -> Any:
        calls.append(waits)
        return preprocess_pb2.TokenizeResponse()

    bodies._replicas.call = call  # type: ignore[method-assign, assignment]
    text = json.dumps({"messages": [{"role": "user", "content": content}]})
    await bodies.tokenized("m", Prompt(openai_body=text.encode()), [], True)
    assert calls == [waits]
