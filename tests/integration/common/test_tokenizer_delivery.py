"""Models travel from their workers to the services that are not configured with them."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import pack_u32, unpack_u32
from services.common.base.tasks import Stop
from services.common.discovery import model_discovery
from services.common.discovery.discovered_models import DiscoveredModel, RetainedModel
from services.common.discovery.model_discovery import ModelDiscovery
from services.common.discovery.tokenizer_fetch import HeldTokenizers, fetch_tokenizer
from services.common.discovery.tokenizer_store import IncomingTokenizer, TokenizerStore
from services.common.discovery.worker_watch import WorkerWatch
from services.common.net.ports import free_port
from services.common.packages.model_files import fingerprint
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.postprocess import service as postprocess
from services.postprocess.settings import PostprocessSettings
from services.preprocess import __main__ as preprocess
from services.preprocess.settings import PreprocessSettings
from services.router import __main__ as router
from services.router.settings import RouterSettings
from services.worker.server import WorkerServer
from sluice.v1 import postprocess_pb2, postprocess_pb2_grpc, preprocess_pb2, preprocess_pb2_grpc
from tests.support.data.loaded_tokenizers import tekken, tiny_folder, tiny_hf
from tests.support.data.tiny_models import build_tiny_model
from tests.support.servers.workers import hosted
from tests.support.waiting import until

STAND_IN = Path(__file__).parents[2] / "support" / "fake_vllm_package"
TOOLS = b'[{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]'


class Host:
    """Loads models with a function."""

    def __init__(self, add: Callable[[DiscoveredModel], Awaitable[None]]) -> None:
        self._add = add

    async def add(self, model: DiscoveredModel) -> None:
        await self._add(model)

    async def remove(self, model: DiscoveredModel) -> None:
        """Unloads nothing."""

    def by_use(self) -> Sequence[str]:
        return ()


@pytest.fixture
def store(tmp_path: Path) -> TokenizerStore:
    return TokenizerStore(tmp_path / "cache")


async def delivered(host: WorkerServer, store: TokenizerStore) -> Path:
    return await fetch_tokenizer(f"127.0.0.1:{host.server.port}", host.worker.config.fingerprint, store)


async def test_a_tokenizer_arrives_as_it_was(store: TokenizerStore) -> None:
    async with hosted(tiny_folder()) as host:
        path = await delivered(host, store)
    assert fingerprint(path) == host.worker.config.fingerprint == tiny_hf().facts.fingerprint
    assert store.find(host.worker.config.fingerprint) == path
    assert {file.name for file in path.iterdir()} == {file.name for file in tiny_folder().iterdir()}


async def test_a_single_file_under_a_name_of_its_own_arrives_too(store: TokenizerStore, tmp_path: Path) -> None:
    async with hosted(tmp_path, model="tekken=mistral-common:tekken_240911") as host:
        path = await delivered(host, store)
    assert path.is_file()
    assert fingerprint(path) == tekken().facts.fingerprint


async def test_another_tokenizer_than_announced_is_refused(store: TokenizerStore) -> None:
    async with hosted(tiny_folder()) as host:
        with pytest.raises(SluiceError, match="another fingerprint than its card has"):
            await fetch_tokenizer(f"127.0.0.1:{host.server.port}", "0" * 64, store)
    assert store.find("0" * 64) is None


async def test_a_worker_that_is_gone_is_a_typed_error(store: TokenizerStore) -> None:
    with pytest.raises(SluiceError) as caught:
        await fetch_tokenizer(f"127.0.0.1:{free_port()}", "0" * 64, store)
    assert caught.value.kind is ErrorKind.UNAVAILABLE


async def test_a_full_disk_is_a_typed_error_and_nothing_stays_on_it(
    store: TokenizerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(incoming: IncomingTokenizer, name: str, size: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with hosted(tiny_folder()) as host:
        with monkeypatch.context() as patched:
            patched.setattr(IncomingTokenizer, "add", full)
            with pytest.raises(SluiceError, match="No space left on device"):  # who learns models tries again
                await delivered(host, store)
        assert list((tmp_path / "cache").iterdir()) == []
        assert store.find(host.worker.config.fingerprint) is None
        await delivered(host, store)
    assert store.find(host.worker.config.fingerprint) is not None


async def test_a_model_is_learned_again_when_its_files_change(tmp_path: Path, store: TokenizerStore) -> None:
    folder = build_tiny_model(tmp_path / "model")
    port = free_port()
    learned: list[DiscoveredModel] = []
    watch = WorkerWatch(None, [f"127.0.0.1:{port}"])

    async def on_model(model: DiscoveredModel) -> None:
        learned.append(model)

    delivery = ModelDiscovery("test", watch, HeldTokenizers(store), Host(on_model), {"other"})
    delivery.start()
    try:
        async with hosted(folder, listen=f"127.0.0.1:{port}"):
            assert await delivery.wait_for("tiny", 60)
        (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
        async with hosted(folder, listen=f"127.0.0.1:{port}"):
            for _ in range(600):
                if len(learned) == 2:
                    break
                await asyncio.sleep(0.1)
    finally:
        await delivery.close()
    first, second = learned
    assert first.fingerprint != second.fingerprint == fingerprint(folder)
    assert first.engine == "mock"
    assert Path(second.spec.source) == store.find(second.fingerprint)


@pytest.mark.parametrize("loads", [True, False])
async def test_who_starts_late_catches_up_with_what_is_served_and_waits_for_nothing_else(
    store: TokenizerStore, loads: bool
) -> None:
    loading, let_go = asyncio.Event(), asyncio.Event()

    async def on_model(_: DiscoveredModel) -> None:
        loading.set()
        await let_go.wait()
        if not loads:
            raise SluiceError(ErrorKind.INVALID_ARGUMENT, "no such tokenizer")

    async with hosted(tiny_folder()) as host:
        watch = WorkerWatch(None, [f"127.0.0.1:{host.server.port}"])
        delivery = ModelDiscovery("test", watch, HeldTokenizers(store), Host(on_model))
        delivery.start()
        caught_up = asyncio.create_task(delivery.catch_up())
        try:
            await asyncio.wait_for(loading.wait(), 60)
            assert not caught_up.done()
            let_go.set()
            await asyncio.wait_for(caught_up, 60)
        finally:
            await delivery.close()


async def test_a_router_that_does_not_answer_is_not_waited_for_long(
    store: TokenizerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def on_model(_: DiscoveredModel) -> None:
        raise AssertionError("no worker serves a model")

    monkeypatch.setattr(model_discovery, "ROUTER_S", 0.1)
    delivery = ModelDiscovery("test", WorkerWatch(None, ["127.0.0.1:1"]), HeldTokenizers(store), Host(on_model))
    await asyncio.wait_for(delivery.catch_up(), 60)


async def test_the_model_cards_template_replaces_the_files_own(tmp_path: Path) -> None:
    template = tmp_path / "card.jinja"
    template.write_text("card:{{ messages[0].content }}")
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("worker", "preprocess")}
    settings = ["--listen", addresses["preprocess"], "--workers", addresses["worker"], "--drain-s", "0"]
    async with (
        hosted(tiny_folder(), listen=addresses["worker"], chat_template=template),
        running(
            preprocess.serve, PreprocessSettings.load([*settings, "--tokenizer-cache", str(tmp_path / "pre")])
        ) as channel,
    ):
        chat = preprocess_pb2.ChatInput(messages_json=b'[{"role": "user", "content": "hi"}]')
        stub = preprocess_pb2_grpc.PreprocessStub(channel)
        answer = await stub.Render(preprocess_pb2.RenderRequest(model="tiny", chat=chat), timeout=60)
    assert answer.text == "card:hi"


async def test_the_model_cards_parser_is_what_auto_means(tmp_path: Path) -> None:
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("worker", "postprocess")}
    settings = ["--listen", addresses["postprocess"], "--workers", addresses["worker"], "--drain-s", "0"]
    call = "<function=now>\n</function>"
    tools = b'[{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]'
    async with (
        hosted(tiny_folder(), listen=addresses["worker"], tool_parser="qwen3_coder"),
        running(
            postprocess.serve, PostprocessSettings.load([*settings, "--tokenizer-cache", str(tmp_path / "post")])
        ) as channel,
    ):
        options = postprocess_pb2.StreamOptions(model="tiny", tool_parser="auto", tools_json=tools)
        ids = pack_u32(tiny_hf().encode_text(f"<tool_call>\n{call}\n</tool_call>"))
        parse = postprocess_pb2.ParseRequest(options=options, token_ids=ids)
        answer = await postprocess_pb2_grpc.PostprocessStub(channel).Parse(parse, timeout=60)
    assert [found.name for found in answer.tool_calls] == ["now"]


async def test_templates_in_a_folder_of_their_own_arrive_too(tmp_path: Path, store: TokenizerStore) -> None:
    folder = build_tiny_model(tmp_path / "model")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    async with hosted(folder) as host:
        path = await delivered(host, store)
    assert fingerprint(path) == fingerprint(folder) != fingerprint(tiny_folder())
    assert (path / "additional_chat_templates" / "rag.jinja").read_text() == "rag"


async def test_nobody_waits_long_for_a_model_that_no_worker_has(store: TokenizerStore) -> None:
    async def on_model(model: DiscoveredModel) -> None:
        raise AssertionError(model)

    delivery = ModelDiscovery("test", WorkerWatch(None), HeldTokenizers(store), Host(on_model))
    assert not await asyncio.wait_for(delivery.wait_for("nothing", 600), 30)


@asynccontextmanager
async def running(serve: Callable[[Any, Stop], Any], settings: Any) -> AsyncIterator[grpc.aio.Channel]:
    stop = Stop()
    task = asyncio.ensure_future(serve(settings, stop))
    channel = open_channel(settings.listen)
    try:
        await asyncio.wait_for(channel.channel_ready(), 60)
        yield channel
    finally:
        await channel.close()
        stop.set()
        await task


async def test_a_cluster_needs_no_shared_volume_and_no_list_of_models(tmp_path: Path) -> None:
    model = tmp_path / "on-the-worker" / "tiny"
    shutil.copytree(tiny_folder(), model)
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("router", "preprocess", "postprocess")}
    shared = ["--routers", addresses["router"], "--drain-s", "0", "--tokenizer-cache"]
    async with (
        running(router.serve, RouterSettings.load(["--listen", addresses["router"], "--drain-s", "0"])),
        running(
            preprocess.serve,
            PreprocessSettings.load(["--listen", addresses["preprocess"], *shared, str(tmp_path / "pre")]),
        ) as pre_channel,
        running(
            postprocess.serve,
            PostprocessSettings.load(["--listen", addresses["postprocess"], *shared, str(tmp_path / "post")]),
        ) as post_channel,
    ):
        pre = preprocess_pb2_grpc.PreprocessStub(pre_channel)
        post = postprocess_pb2_grpc.PostprocessStub(post_channel)
        text = preprocess_pb2.TokenizeRequest(model="tiny", text=preprocess_pb2.TextInput(text="hello world"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pre.Tokenize(text)
        assert from_rpc_error(caught.value, "preprocess").code == "model_not_found"
        async with hosted(model, routers=[addresses["router"]], model=f"tiny={model}") as host:
            assert host.registration is not None
            await asyncio.wait_for(host.registration.attached.wait(), 60)
            ids = (await pre.Tokenize(text, timeout=60)).token_ids
            assert unpack_u32(ids).tolist() == tiny_hf().encode_text("hello world")
            parse = postprocess_pb2.ParseRequest(options=postprocess_pb2.StreamOptions(model="tiny"), token_ids=ids)
            assert (await post.Parse(parse, timeout=60)).text == "hello world"
        shutil.rmtree(model)  # and it is served on, from what was delivered
        assert (await pre.Tokenize(text, timeout=60)).token_ids == ids
        (info,) = (await pre.ListModels(preprocess_pb2.ListTokenizersRequest())).models
        assert info.tokenizer.fingerprint == tiny_hf().facts.fingerprint


async def test_learned_model_without_workers_ends_after_its_grace_and_returns_with_its_next_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_discovery, "RetainedModel", partial(RetainedModel, models=1, grace_s=0.2))
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("router", "preprocess", "postprocess")}
    caches = {name: tmp_path / name for name in ("preprocess", "postprocess")}

    def settings(name: str) -> list[str]:
        learning = ["--routers", addresses["router"], "--drain-s", "0"]
        return ["--listen", addresses[name], *learning, "--tokenizer-cache", str(caches[name])]

    async with (
        running(router.serve, RouterSettings.load(["--listen", addresses["router"], "--drain-s", "0"])),
        running(preprocess.serve, PreprocessSettings.load(settings("preprocess"))) as pre_channel,
        running(postprocess.serve, PostprocessSettings.load(settings("postprocess"))) as post_channel,
    ):
        pre = preprocess_pb2_grpc.PreprocessStub(pre_channel)
        post = postprocess_pb2_grpc.PostprocessStub(post_channel)

        async def served() -> set[str]:
            return {info.model for info in (await pre.ListModels(preprocess_pb2.ListTokenizersRequest())).models}

        async def tokenized(model: str) -> bytes:
            text = preprocess_pb2.TokenizeRequest(model=model, text=preprocess_pb2.TextInput(text="hello world"))
            return bytes((await pre.Tokenize(text, timeout=60)).token_ids)

        async def parsed(model: str, ids: bytes) -> str:
            parse = postprocess_pb2.ParseRequest(options=postprocess_pb2.StreamOptions(model=model), token_ids=ids)
            return str((await post.Parse(parse, timeout=60)).text)

        ids = tiny_hf().encode_text("hello world")
        for model in ("first", "second", "first"):  # one more than is learned at a time, and one that returns
            folder = tmp_path / model
            shutil.copytree(tiny_folder(), folder, dirs_exist_ok=True)
            (folder / "README.md").write_text(model)
            async with hosted(folder, routers=[addresses["router"]], model=f"{model}={folder}") as host:
                assert host.registration is not None
                await asyncio.wait_for(host.registration.attached.wait(), 60)
                got = await tokenized(model)
                assert unpack_u32(got).tolist() == ids
                assert await parsed(model, got) == "hello world"
                assert await served() == {model}
            await until(lambda: not any(files for cache in caches.values() for _, _, files in os.walk(cache)))
            assert await served() == set()
            for ended in (tokenized(model), parsed(model, got)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ended
                assert from_rpc_error(caught.value, "service").code == "model_not_found"


async def test_more_models_than_are_loaded_at_a_time_are_all_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_discovery, "RetainedModel", partial(RetainedModel, models=1))
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("router", "preprocess", "postprocess")}

    def settings(name: str) -> list[str]:
        learning = ["--routers", addresses["router"], "--drain-s", "0"]
        return ["--listen", addresses[name], *learning, "--tokenizer-cache", str(tmp_path / name)]

    async with (
        running(router.serve, RouterSettings.load(["--listen", addresses["router"], "--drain-s", "0"])),
        hosted(tiny_folder(), routers=[addresses["router"]], model=f"first={tiny_folder()}"),
        hosted(tiny_folder(), routers=[addresses["router"]], model=f"second={tiny_folder()}"),
        running(preprocess.serve, PreprocessSettings.load(settings("preprocess"))) as pre_channel,
        running(postprocess.serve, PostprocessSettings.load(settings("postprocess"))) as post_channel,
    ):
        pre = preprocess_pb2_grpc.PreprocessStub(pre_channel)
        post = postprocess_pb2_grpc.PostprocessStub(post_channel)
        for model in ("first", "second", "first", "second"):  # their workers stay
            text = preprocess_pb2.TokenizeRequest(model=model, text=preprocess_pb2.TextInput(text="hello world"))
            ids = (await pre.Tokenize(text, timeout=60)).token_ids
            assert unpack_u32(ids).tolist() == tiny_hf().encode_text("hello world")
            parse = postprocess_pb2.ParseRequest(options=postprocess_pb2.StreamOptions(model=model), token_ids=ids)
            assert (await post.Parse(parse, timeout=60)).text == "hello world"
            listed = (await pre.ListModels(preprocess_pb2.ListTokenizersRequest())).models
            assert [info.model for info in listed] == [model]


async def test_engines_processes_end_with_the_last_worker_and_start_again_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    monkeypatch.setattr(model_discovery, "RetainedModel", partial(RetainedModel, grace_s=0.2))
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("router", "preprocess", "postprocess")}

    def settings(name: str) -> list[str]:
        learning = ["--routers", addresses["router"], "--vllm-processing"]
        return ["--listen", addresses[name], *learning, "--drain-s", "0", "--tokenizer-cache", str(tmp_path / name)]

    def engines() -> int:
        """Processes with the engine's code: a model's tokenizer, the parsers' loader and its copy."""
        found = 0
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                found += process.status() != psutil.STATUS_ZOMBIE and "vllm" in process.cmdline()
        return found

    async with (
        running(router.serve, RouterSettings.load(["--listen", addresses["router"], "--drain-s", "0"])),
        running(preprocess.serve, PreprocessSettings.load(settings("preprocess"))) as pre_channel,
        running(postprocess.serve, PostprocessSettings.load(settings("postprocess"))) as post_channel,
    ):
        pre = preprocess_pb2_grpc.PreprocessStub(pre_channel)
        post = postprocess_pb2_grpc.PostprocessStub(post_channel)
        for _ in range(2):
            async with hosted(tiny_folder(), routers=[addresses["router"]]):
                chat = preprocess_pb2.ChatInput(messages_json=b'[{"role": "user", "content": "hi"}]')
                rendered = await pre.Render(preprocess_pb2.RenderRequest(model="tiny", chat=chat), timeout=120)
                assert rendered.text == "<by the engine>hi"
                options = postprocess_pb2.StreamOptions(model="tiny", tool_parser="vllm:hermes", tools_json=TOOLS)
                ids = pack_u32(tiny_hf().encode_text("hello"))
                parse = postprocess_pb2.ParseRequest(options=options, token_ids=ids)
                assert (await post.Parse(parse, timeout=120)).text == "HELLO", "as the stand-in's parser writes it"
                assert engines() == 3
            await until(lambda: engines() == 0)
