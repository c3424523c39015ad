"""Chats with images over gRPC, by every processor: ids from other processes, and rendered text."""

from __future__ import annotations

import importlib.util
import threading
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.common.base.errors import ErrorKind
from services.common.base.packing import pack_u64, unpack_u32
from services.common.rpc.channels import open_channel
from services.common.rpc.media import read_spans
from services.common.rpc.server import GrpcServer
from services.common.types.hashing import block_hashes
from services.common.types.media.parts import MediaLimits
from services.common.types.media.spans import MediaKind, content_hash
from services.preprocess.engines.processor_rule import ProcessorRule
from services.preprocess.media.addresses import AllowedHosts, PublicAddresses
from services.preprocess.media.checking import MediaChecker
from services.preprocess.media.child import CLIPS
from services.preprocess.media.fetching import FetchLimits, MediaFetcher
from services.preprocess.media.https_get import HttpsGet
from services.preprocess.media.loading import MediaLoader
from services.preprocess.service import PreprocessService
from services.preprocess.settings import PreprocessSettings
from services.preprocess.thread_pool import ComputePool
from services.preprocess.tokenizers.engine_extensions import EngineOptions
from services.preprocess.tokenizers.loading import load_tokenizer
from services.preprocess.tokenizers.registry import ModelRegistry
from sluice.v1 import preprocess_pb2 as pb
from sluice.v1 import preprocess_pb2_grpc
from tests.integration.preprocess.test_preprocess_media import BLOCK, PART, Stub, asked, error_of
from tests.support.clients.callers import refused
from tests.support.data.images import image_file
from tests.support.data.loaded_tokenizers import limits, tiny_folder
from tests.support.data.tiny_vlm import build_llava
from tests.support.data.unknown_family import build_unknown_family
from tests.support.fakes.fake_interpreters import ENGINE_MARK, write_image_engine, write_image_processor

REASON = "The abacus counts no images."
PLACEHOLDERS = {"llava": "<image>", "other": "<pic>", "tekken": "[IMG]", "engine": ENGINE_MARK}
"""What stands for an image in the text of each model's prompts."""


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[Stub]:
    """Yields a stub of a service with a model of each processor."""
    engines = {
        "vllm": EngineOptions(write_image_engine(tmp_path / "vllm-python")),
        "sglang": EngineOptions(write_image_engine(tmp_path / "sglang-python", REASON)),
    }
    other = {"vllm": EngineOptions(write_image_processor(tmp_path / "processor-python"))}
    tiny = tiny_folder()
    models = {
        "llava": f"{build_llava(tmp_path / 'llava')}@hf",
        "other": f"{build_unknown_family(tmp_path / 'other')}@hf",
        "tekken": "mistral-common:tekken_240911",
        "engine": f"{tiny}@vllm",
        "text": f"{tiny}@sglang",
        "tiny": f"{tiny}@hf",
    }
    listed = ",".join(f"{name}={source}" for name, source in models.items())
    settings = PreprocessSettings.load(["--listen", "127.0.0.1:0", "--models", listed])
    most = 1 << 20
    fetcher = MediaFetcher(AllowedHosts([]), HttpsGet(PublicAddresses(), most, 5.0), FetchLimits(most))
    loader = MediaLoader(fetcher, MediaChecker(), MediaChecker(group=CLIPS), MediaLimits(4, most, most))
    registry = ModelRegistry(
        settings.served, lambda spec: load_tokenizer(spec, limits(), other if spec.name == "other" else engines)
    )
    pool = ComputePool(2, max_waiting=8, inline_bytes=8192, limit_s=30)
    waiters = ComputePool(4, max_waiting=8, inline_bytes=0, limit_s=60)
    server = GrpcServer(settings, pb.DESCRIPTOR)
    service = PreprocessService(registry, pool, 1 << 20, waiters, media=loader)
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
        waiters.close()


@pytest.fixture(autouse=True)
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this interpreter one without transformers, whether it has it or not."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "transformers" else found(name, *more)
    )


async def test_engine_tokenizer_expands_images_with_hashes_and_spans(tmp_path: Path) -> None:
    red, blue = image_file(40, 30), image_file(70, 30, color=(0, 0, 250))
    async with serving(tmp_path) as stub:
        found = await stub.Tokenize(asked("engine", [red, blue]))
        hashes = await stub.Tokenize(asked("engine", [red, blue], hashes_only=True))
        models = {each.model: each.tokenizer for each in (await stub.ListModels(pb.ListTokenizersRequest())).models}
    ids = unpack_u32(found.token_ids).tolist()
    assert ids == [1] * 11 + list(b"What is it?")
    spans = read_spans(found.media, len(ids))
    assert [(span.hash, span.offset, span.length) for span in spans] == [
        (content_hash(red), 0, 4),
        (content_hash(blue), 4, 7),
    ]
    assert found.block_hashes == hashes.block_hashes == pack_u64(block_hashes(ids, BLOCK, media=spans))
    assert models["engine"].media_fingerprint
    assert models["text"].media_fingerprint == ""


async def test_engine_tokenizer_refuses_typed_placeholders_and_names_why_it_takes_no_images(tmp_path: Path) -> None:
    file = image_file(40, 30)
    typed = [{"type": "image", "media": 0}, {"type": "text", "text": f"see {ENGINE_MARK}"}]
    async with serving(tmp_path) as stub:
        error = await error_of(stub, asked("engine", [file], content=typed))
        assert (error.kind, error.code, error.param) == (ErrorKind.INVALID_ARGUMENT, "invalid_media", "messages")
        error = await error_of(stub, asked("text", [file]))
        assert (error.kind, error.code, error.param) == (ErrorKind.INVALID_ARGUMENT, "media_not_supported", PART)
        assert error.message.endswith(REASON)


async def test_sizes_that_only_another_process_knows_are_looked_up_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[tuple[int, bool]] = []
    ids = ProcessorRule.ids

    def recorded(rule: ProcessorRule, width: int, height: int) -> array[int]:
        looked_up.append((width, threading.current_thread() is threading.main_thread()))
        return ids(rule, width, height)

    async with serving(tmp_path) as stub:
        await stub.Tokenize(asked("other", []))  # loads the model
        monkeypatch.setattr(ProcessorRule, "ids", recorded)
        found = await stub.Tokenize(asked("other", [image_file(40, 30), image_file(70, 30)]))
        error = await error_of(stub, asked("other", [image_file(501, 3)]))
    assert [on_loop for width, on_loop in looked_up if width == 40] == [False, True]  # then as known
    assert [span.length for span in read_spans(found.media, found.prompt_tokens)] == [2, 2]
    numbers = unpack_u32(found.token_ids).tolist()
    assert (numbers[0], numbers[2]) == (40, 70)
    assert (error.kind, error.code, error.param) == (ErrorKind.INVALID_ARGUMENT, "invalid_media", PART)
    assert "is refused by the model's processor: too wide" in error.message


@pytest.mark.parametrize("model", sorted(PLACEHOLDERS))
async def test_rendered_chat_shows_one_placeholder_for_each_image(model: str, tmp_path: Path) -> None:
    files: list[bytes | str] = [image_file(40, 30), image_file(70, 30), "https://images.example.com/a.png"]
    async with serving(tmp_path) as stub:
        chat = asked(model, files).chat
        text = (await stub.Render(pb.RenderRequest(model=model, chat=chat))).text
        assert text.count(PLACEHOLDERS[model]) == len(files)
        assert "What is it?" in text


@pytest.mark.parametrize("model", ["tiny", "text"])
async def test_rendered_chat_with_images_is_refused_for_models_without(model: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as stub:
        chat = asked(model, [image_file(40, 30)]).chat
        error = await refused(stub.Render(pb.RenderRequest(model=model, chat=chat)))
        assert (error.kind, error.code, error.param) == (ErrorKind.INVALID_ARGUMENT, "media_not_supported", PART)
        chat = asked("llava", [image_file(40, 30)], kind=MediaKind.AUDIO).chat
        error = await refused(stub.Render(pb.RenderRequest(model="llava", chat=chat)))
        assert (error.code, error.param) == ("media_not_supported", PART)
