from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.base.errors import ErrorKind
from services.common.base.packing import pack_u32, pack_u64, unpack_u32
from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from services.common.rpc.server import GrpcServer
from services.common.types.hashing import HASH_SCHEME, block_hashes
from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.service import PreprocessService
from services.preprocess.settings import PreprocessSettings
from services.preprocess.thread_pool import ComputePool
from services.preprocess.tokenizers.hf import HfTokenizer
from services.preprocess.tokenizers.loading import load_tokenizer
from services.preprocess.tokenizers.registry import ModelRegistry
from sluice.v1 import preprocess_pb2 as pb
from sluice.v1 import preprocess_pb2_grpc
from tests.support.clients.callers import refused
from tests.support.data.loaded_tokenizers import limits, tekken, tiny_folder, tiny_hf
from tests.support.data.tiny_models import build_tiny_model

USER = {"role": "user", "content": "What is the weather in Paris today?"}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
MAX_PROMPT = 100_000


@asynccontextmanager
async def serving(
    inline_bytes: int = 8192, tokenize_threads: int = 2
) -> AsyncIterator[tuple[preprocess_pb2_grpc.PreprocessAsyncStub, ModelRegistry]]:
    models = (f"tiny={tiny_folder()}", f"again={tiny_folder()}@hf", "tekken=mistral-common:tekken_240911")
    settings = PreprocessSettings.load(["--listen", "127.0.0.1:0", "--models", ",".join(models)])
    known = {"tiny": tiny_hf, "tekken": tekken}
    registry = ModelRegistry(
        settings.served, lambda spec: known[spec.name]() if spec.name in known else load_tokenizer(spec, limits())
    )
    pool = ComputePool(tokenize_threads, max_waiting=8, inline_bytes=inline_bytes, limit_s=30)
    server = GrpcServer(settings, pb.DESCRIPTOR)
    preprocess_pb2_grpc.add_PreprocessServicer_to_server(PreprocessService(registry, pool, MAX_PROMPT), server.server)
    await server.start()
    channel = open_channel(f"127.0.0.1:{server.port}")
    try:
        yield preprocess_pb2_grpc.PreprocessStub(channel), registry
    finally:
        await channel.close()
        await server.stop(0)
        await registry.close()
        pool.close()


@pytest.fixture
async def stub() -> AsyncIterator[preprocess_pb2_grpc.PreprocessAsyncStub]:
    async with serving() as (made, _):
        yield made


def chat(*messages: dict[str, Any], **parts: Any) -> pb.ChatInput:
    encoded: dict[str, Any] = {
        name: json.dumps(part, ensure_ascii=False).encode() if name.endswith("_json") else part
        for name, part in parts.items()
    }
    return pb.ChatInput(messages_json=json.dumps(messages or [USER], ensure_ascii=False).encode(), **encoded)


@pytest.mark.parametrize("model", ["tiny", "tekken"])
@pytest.mark.parametrize("inline_bytes", [8192, 0])
async def test_a_chat_becomes_ids_with_all_that_belongs_to_them(model: str, inline_bytes: int) -> None:
    tokenizer = {"tiny": tiny_hf, "tekken": tekken}[model]()
    async with serving(inline_bytes) as (stub, _):
        reply = await stub.Tokenize(
            pb.TokenizeRequest(model=model, chat=chat(tools_json=[TOOL]), block_size=4, lora="l", cache_salt="s")
        )
    ids = tokenizer.encode_chat(ChatRequest([USER], tools=[TOOL]))
    assert unpack_u32(reply.token_ids).tolist() == ids
    assert reply.block_hashes == pack_u64(block_hashes(ids, 4, "l", "s"))
    assert len(reply.block_hashes) // 8 == len(ids) // 4 > 0
    assert reply.hash_scheme == HASH_SCHEME
    assert unpack_u32(reply.prompt_tail).tolist() == ids[-16:]
    assert tuple(unpack_u32(reply.eos_token_ids)) == tokenizer.facts.eos_ids
    assert tuple(unpack_u32(reply.stop_token_ids)) == ()
    assert reply.context_length == tokenizer.facts.context_length
    assert reply.fingerprint == tokenizer.facts.fingerprint


@pytest.mark.parametrize("length", [1, 200])
@pytest.mark.parametrize("model", ["tiny", "tekken"])
@pytest.mark.parametrize(
    ("content", "continued", "thinking"),
    [
        ("<think>\nI see {}", True, True),
        ([{"type": "text", "text": "<think>I see {}"}], True, True),
        ("[THINK]I see {}", True, True),
        ("<think>\nI see {}</think>It is", True, False),
        ("It is {}", True, False),
        ("<think>\nI see {}", False, False),
    ],
)
async def test_thought_that_the_continued_message_leaves_open_is_reported(
    stub: preprocess_pb2_grpc.PreprocessAsyncStub,
    model: str,
    content: Any,
    continued: bool,
    thinking: bool,
    length: int,
) -> None:
    filled = json.loads(json.dumps(content).replace("{}", "much ü " * length + "more"))
    request = chat(USER, {"role": "assistant", "content": filled}, continue_final_message=continued)
    reply = await stub.Tokenize(pb.TokenizeRequest(model=model, chat=request))
    assert reply.thinking == thinking


async def test_ids_are_checked_hashed_and_passed_on(stub: preprocess_pb2_grpc.PreprocessAsyncStub) -> None:
    packed = pack_u32(range(100))
    reply = await stub.Tokenize(pb.TokenizeRequest(model="tiny", tokens=pb.TokenInput(token_ids=packed), block_size=16))
    assert reply.token_ids == packed
    assert reply.block_hashes == pack_u64(block_hashes(packed, 16))
    assert reply.prompt_tail == pack_u32(range(84, 100))
    outside = pack_u32([5, tiny_hf().facts.vocab_size])
    error = await refused(stub.Tokenize(pb.TokenizeRequest(model="tiny", tokens=pb.TokenInput(token_ids=outside))))
    assert (error.kind, error.param) == (ErrorKind.INVALID_ARGUMENT, "token_ids")
    assert "outside the model's vocabulary" in error.message
    error = await refused(stub.Tokenize(pb.TokenizeRequest(model="tiny", tokens=pb.TokenInput(token_ids=b"\0\0\0"))))
    assert "not a multiple of 4" in error.message


async def test_models_are_listed_and_load_on_first_use() -> None:
    async with serving() as (stub, _):
        before = await stub.ListModels(pb.ListTokenizersRequest())
        assert [(info.model, info.loaded, info.vocab_size) for info in before.models] == [
            ("again", False, 0), ("tekken", False, 0), ("tiny", False, 0)
        ]  # fmt: skip
        found = await stub.GetFingerprint(pb.GetFingerprintRequest(model="again"))
        assert found.tokenizer.fingerprint == tiny_hf().facts.fingerprint
        assert found.template_fingerprint == tiny_hf().facts.template_fingerprint
        assert (found.tokenizer.processor, found.tokenizer.source) == ("hf", str(tiny_folder()))
        (again, _, _) = (await stub.ListModels(pb.ListTokenizersRequest())).models
        assert again.loaded
        assert again.has_chat_template
        assert again.vocab_size == tiny_hf().facts.vocab_size
        assert again.tokenizer.fingerprint == found.tokenizer.fingerprint
        assert (again.backend, again.cache_refusal) == ("fastokens", "")


async def test_what_the_models_files_recommend_comes_with_the_ids(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 0, "max_new_tokens": 99}')
    async with serving() as (stub, registry):
        registry._loaded["tiny"] = HfTokenizer(folder, limits())
        with_defaults = await stub.Tokenize(pb.TokenizeRequest(model="tiny", chat=chat()))
        without = await stub.Tokenize(pb.TokenizeRequest(model="again", chat=chat()))
    options = with_defaults.default_sampling
    assert {field.name: value for field, value in options.ListFields()} == {"temperature": 0.5, "top_k": 0}
    assert with_defaults.default_max_tokens == 99
    assert not without.default_sampling.ListFields()
    assert not without.HasField("default_max_tokens")


BAD_REQUESTS: list[tuple[pb.TokenizeRequest, ErrorKind, str, str]] = [
    (pb.TokenizeRequest(model="gpt-9", chat=chat()), ErrorKind.NOT_FOUND, "model", "has again, tekken, tiny"),
    (pb.TokenizeRequest(chat=chat()), ErrorKind.NOT_FOUND, "model", "this server has"),
    (pb.TokenizeRequest(model="tiny"), ErrorKind.INVALID_ARGUMENT, "input", "has no input"),
    (pb.TokenizeRequest(model="tiny", chat=pb.ChatInput()), ErrorKind.INVALID_ARGUMENT, "messages", "array"),
    (pb.TokenizeRequest(model="tiny", chat=pb.ChatInput(messages_json=b"{")), ErrorKind.INVALID_ARGUMENT, "messages",
     "not valid JSON"),
    (pb.TokenizeRequest(model="tiny", chat=pb.ChatInput(messages_json=b"[]")), ErrorKind.INVALID_ARGUMENT, "messages",
     "at least one"),
    (pb.TokenizeRequest(model="tiny", chat=chat({"role": "robot", "content": ""})), ErrorKind.INVALID_ARGUMENT,
     "messages[0].role", "'robot' is unknown"),
    (pb.TokenizeRequest(model="tekken", chat=chat({"role": "assistant", "content": "x"})), ErrorKind.INVALID_ARGUMENT,
     "messages", "start with a user message"),
    (pb.TokenizeRequest(model="tiny", chat=chat(chat_template="{% if %}")), ErrorKind.INVALID_ARGUMENT, "chat_template",
     "syntax error"),
    (pb.TokenizeRequest(model="tiny", chat=chat(chat_template="{{ 'a' | center(10 ** 11) }}")),
     ErrorKind.INVALID_ARGUMENT,
     "chat_template", "too much memory"),
    (pb.TokenizeRequest(model="tekken", chat=chat(chat_template="x")), ErrorKind.INVALID_ARGUMENT, "chat_template",
     "does not support chat templates"),
    (pb.TokenizeRequest(model="tiny", text=pb.TextInput(text="x" * (MAX_PROMPT + 1))), ErrorKind.TOO_LARGE, "prompt",
     "at most 100,000"),
    (pb.TokenizeRequest(model="tiny", chat=chat({"role": "user", "content": "x" * MAX_PROMPT})), ErrorKind.TOO_LARGE,
     "messages", "at most 100,000"),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "kind", "param", "sentence"), BAD_REQUESTS)
async def test_a_bad_request_is_a_typed_error(
    stub: preprocess_pb2_grpc.PreprocessAsyncStub,
    request_: pb.TokenizeRequest,
    kind: ErrorKind,
    param: str,
    sentence: str,
) -> None:
    error = await refused(stub.Tokenize(request_))
    assert (error.kind, error.param) == (kind, param)
    assert sentence in error.message
    assert "Traceback" not in error.message


async def test_a_defect_is_answered_without_its_text() -> None:
    class Broken(type(tiny_hf())):  # type: ignore[misc]
        def __init__(self) -> None:
            self.facts = tiny_hf().facts

        def encode_text(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
            raise ZeroDivisionError("secret")

    async with serving() as (stub, registry):
        registry._loaded["tiny"] = Broken()
        error = await refused(stub.Tokenize(pb.TokenizeRequest(model="tiny", text=pb.TextInput(text="x"))))
    assert error.kind is ErrorKind.INTERNAL
    assert "secret" not in error.message


async def start_process(*arguments: str) -> asyncio.subprocess.Process:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLUICE_")}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.preprocess", *arguments, env=environment, stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def test_the_process_is_healthy_once_loaded_serves_and_ends_on_sigterm() -> None:
    address = f"127.0.0.1:{free_port()}"
    process = await start_process("--listen", address, "--models", f"tiny={tiny_folder()}", "--drain-s", "5")
    channel = open_channel(address)
    try:
        await asyncio.wait_for(channel.channel_ready(), 120)
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="sluice.v1.Preprocess"), timeout=120)
        async for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                break
        watch.cancel()
        stub = preprocess_pb2_grpc.PreprocessStub(channel)
        (info,) = (await stub.ListModels(pb.ListTokenizersRequest())).models
        assert info.loaded
        request = pb.RenderRequest(model="tiny", chat=chat(chat_template="{{ messages[0].role }}"))
        assert (await stub.Render(request)).text == "user"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 120) == 0
    finally:
        await channel.close()
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--models", "m=./nowhere"], 1, "Model folder ./nowhere does not exist."),
        (["--models", "m="], 2, "has no source"),
    ],
)
async def test_the_process_says_why_it_cannot_start(arguments: list[str], code: int, sentence: str) -> None:
    process = await start_process("--listen", f"127.0.0.1:{free_port()}", *arguments)
    _, printed = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == code
    assert sentence in printed.decode()
    assert "Traceback" not in printed.decode()


async def test_origin_of_a_template_is_bounded(stub: preprocess_pb2_grpc.PreprocessAsyncStub) -> None:
    request = pb.RenderRequest(model="tiny", chat=chat(USER, chat_template="x", origin="o" * 257))
    error = await refused(stub.Render(request))
    assert error.kind is ErrorKind.INVALID_ARGUMENT
    assert error.param == "chat.origin"
