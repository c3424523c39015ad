"""Chats with images over gRPC: by the real process, and with files fetched from a server on loopback."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import pack_u64, unpack_u32, unpack_u64
from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from services.common.rpc.media import input_messages, read_spans
from services.common.rpc.server import GrpcServer
from services.common.types.hashing import block_hashes
from services.common.types.media.parts import MediaInput, MediaLimits
from services.common.types.media.spans import MediaKind, content_hash
from services.preprocess.media.addresses import AllowedHosts
from services.preprocess.media.checking import MediaChecker
from services.preprocess.media.child import CLIPS
from services.preprocess.media.fetching import FetchLimits, MediaFetcher
from services.preprocess.media.https_get import HttpsGet
from services.preprocess.media.loading import MediaLoader
from services.preprocess.service import PreprocessService
from services.preprocess.settings import PreprocessSettings
from services.preprocess.thread_pool import ComputePool
from services.preprocess.tokenizers.loading import load_tokenizer
from services.preprocess.tokenizers.registry import ModelRegistry
from sluice.v1 import preprocess_pb2 as pb
from sluice.v1 import preprocess_pb2_grpc
from tests.support.clients.callers import refused
from tests.support.data.images import image_file
from tests.support.data.loaded_tokenizers import limits, tiny_folder
from tests.support.data.tiny_vlm import VisionFolders, build_vision_models
from tests.support.servers.media_host import MediaHost, media_host, response

Stub: TypeAlias = "preprocess_pb2_grpc.PreprocessAsyncStub"
BLOCK = 8
TOTAL_BYTES = 3 << 19
PART = "messages[0].content[0]"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> VisionFolders:
    return build_vision_models(tmp_path_factory.mktemp("vision"))


def models(folders: VisionFolders) -> str:
    served = {"llava": folders.llava, "qwen": folders.qwen2_vl, "tiny": tiny_folder()}
    return ",".join([*(f"{name}={folder}" for name, folder in served.items()), "tekken=mistral-common:tekken_240911"])


@asynccontextmanager
async def process(folders: VisionFolders, *arguments: str) -> AsyncIterator[Stub]:
    """Yields a stub of a preprocess process."""
    address = f"127.0.0.1:{free_port()}"
    command = ("-m", "services.preprocess", "--listen", address, "--models", models(folders), *arguments)
    running = await asyncio.create_subprocess_exec(sys.executable, *command)
    channel = open_channel(address)
    try:
        await asyncio.wait_for(channel.channel_ready(), 120)
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="sluice.v1.Preprocess"), timeout=120
        )
        async for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                break
        watch.cancel()
        yield preprocess_pb2_grpc.PreprocessStub(channel)
    finally:
        await channel.close()
        running.terminate()
        await running.wait()


class Loopback:
    """Permits 127.0.0.1 only."""

    def permits(self, address: str) -> bool:
        return address == "127.0.0.1"


@asynccontextmanager
async def fetching(folders: VisionFolders, host: MediaHost) -> AsyncIterator[Stub]:
    """Yields a stub of a service that fetches from a server on loopback."""

    async def resolve(name: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    most = 1 << 20
    get = HttpsGet(Loopback(), most, 5.0, host.tls, resolve)
    fetcher = MediaFetcher(AllowedHosts([f"media.test:{host.port}"]), get, FetchLimits(most))
    loader = MediaLoader(fetcher, MediaChecker(), MediaChecker(group=CLIPS), MediaLimits(4, most, TOTAL_BYTES))
    settings = PreprocessSettings.load(["--listen", "127.0.0.1:0", "--models", models(folders)])
    registry = ModelRegistry(settings.served, lambda spec: load_tokenizer(spec, limits()))
    pool = ComputePool(2, max_waiting=8, inline_bytes=8192, limit_s=30)
    server = GrpcServer(settings, pb.DESCRIPTOR)
    service = PreprocessService(registry, pool, 1 << 20, media=loader)
    preprocess_pb2_grpc.add_PreprocessServicer_to_server(service, server.server)
    await server.start()
    channel = open_channel(f"127.0.0.1:{server.port}")
    try:
        yield preprocess_pb2_grpc.PreprocessStub(channel)
    finally:
        await channel.close()
        await server.stop(0)
        await registry.close()
        await loader.close()
        pool.close()


def asked(
    model: str, files: Sequence[bytes | str], hashes_only: bool = False, content: Any = None, **fields: Any
) -> pb.TokenizeRequest:
    """Returns a request with images before the text; a string is a URL."""
    parts = [{"type": "image", "media": index} for index in range(len(files))]
    messages = [{"role": "user", "content": content or [*parts, {"type": "text", "text": "What is it?"}]}]
    inputs = [
        MediaInput(
            f"messages[0].content[{index}]",
            fields.get("kind", MediaKind.IMAGE),
            **({"url": file} if isinstance(file, str) else {"data": file}),
            media_type=fields.get("media_type", ""),
        )
        for index, file in enumerate(files)
    ]
    chat = pb.ChatInput(messages_json=json.dumps(messages).encode(), media=input_messages(inputs))
    return pb.TokenizeRequest(model=model, chat=chat, block_size=BLOCK, hashes_only=hashes_only)


def common_blocks(first: pb.TokenizeResponse, second: pb.TokenizeResponse) -> int:
    pairs = zip(unpack_u64(first.block_hashes), unpack_u64(second.block_hashes), strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), -1)


async def error_of(stub: Stub, request: pb.TokenizeRequest) -> SluiceError:
    return await refused(stub.Tokenize(request))


@pytest.mark.parametrize("model", ["llava", "qwen", "tekken"])
async def test_process_expands_images_and_mixes_them_into_block_hashes(folders: VisionFolders, model: str) -> None:
    red, blue = image_file(100, 80), image_file(100, 80, color=(0, 0, 250))
    async with process(folders) as stub:
        first, again, swapped, other = [
            await stub.Tokenize(asked(model, files)) for files in ([red, blue], [red, blue], [blue, red], [blue, blue])
        ]
        hashes = await stub.Tokenize(asked(model, [red, blue], hashes_only=True))
        models = (await stub.ListModels(pb.ListTokenizersRequest())).models
    ids = unpack_u32(first.token_ids).tolist()
    spans = read_spans(first.media, len(ids))
    assert [span.hash for span in spans] == [content_hash(red), content_hash(blue)]
    assert first.block_hashes == pack_u64(block_hashes(ids, BLOCK, media=spans))
    assert first.block_hashes != pack_u64(block_hashes(ids, BLOCK))
    assert again == first
    assert not first.fetched
    assert first.token_ids == swapped.token_ids == other.token_ids
    text_blocks = spans[0].offset // BLOCK
    assert common_blocks(first, swapped) == text_blocks
    assert common_blocks(first, other) == text_blocks
    assert (hashes.block_hashes, hashes.media[:], hashes.prompt_tokens) == (
        first.block_hashes,
        first.media[:],
        len(ids),
    )
    assert not hashes.token_ids
    fingerprints = {each.model: each.tokenizer.media_fingerprint for each in models}
    assert fingerprints[model]
    assert fingerprints["tiny"] == ""


async def test_fetched_file_is_returned_once_and_not_with_hashes_only(folders: VisionFolders) -> None:
    red, blue = image_file(100, 80), image_file(64, 64, "JPEG", color=(0, 0, 250))
    async with media_host() as host, fetching(folders, host) as stub:
        host.answers |= {"/red": response(red), "/blue": response(blue)}
        links = [f"https://media.test:{host.port}/{name}" for name in ("red", "blue", "red")]
        found = await stub.Tokenize(asked("qwen", [*links, red]))
        assert [(each.hash, each.data, each.media_type) for each in found.fetched] == [
            (content_hash(red), red, "image/png"),
            (content_hash(blue), blue, "image/jpeg"),
        ]
        assert [span.hash for span in found.media] == [content_hash(each) for each in (red, blue, red, red)]
        assert len(host.requests) == 2
        hashes = await stub.Tokenize(asked("qwen", links, hashes_only=True))
        assert not hashes.fetched
        assert len(hashes.media) == 3


async def test_files_that_are_too_large_together_are_refused_and_repeated_ones_are_fetched_as_one(
    folders: VisionFolders,
) -> None:
    large = [image_file(8, 8, color=(number, 0, 0)) + bytes(TOTAL_BYTES // 2) for number in range(2)]
    async with media_host() as host, fetching(folders, host) as stub:
        host.answers |= {f"/{number}": response(file) for number, file in enumerate(large)}
        links = [f"https://media.test:{host.port}/{number}" for number in range(2)]
        found = await stub.Tokenize(asked("qwen", [links[0]] * 3))
        assert (len(found.media), len(found.fetched)) == (3, 1)
        refused_together: tuple[Sequence[bytes | str], ...] = (links, large, [links[0], large[1]])
        for files in refused_together:
            error = await error_of(stub, asked("qwen", files))
            assert (error.kind, error.code) == (ErrorKind.TOO_LARGE, "media_too_large")
            assert error.param.startswith("messages[0].content[")
