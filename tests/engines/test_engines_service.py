"""The service with an engine's own code behind it: killed processes, hostile requests, and the others meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from services.common.base.errors import ErrorKind
from services.common.base.packing import unpack_u32
from services.common.base.tasks import Stop
from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from services.preprocess import __main__ as preprocess
from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.settings import PreprocessSettings
from sluice.v1 import preprocess_pb2 as pb
from sluice.v1 import preprocess_pb2_grpc
from tests.engines.servers import python
from tests.support.clients.callers import refused
from tests.support.data.loaded_tokenizers import tiny_folder, tiny_hf

pytestmark = pytest.mark.engines

REQUESTS = 300
HOSTILE = (
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", ErrorKind.DEADLINE_EXCEEDED),
    ("{{ 'a' * 10 ** 12 }}", ErrorKind.INVALID_ARGUMENT),
    ("{% if %}", ErrorKind.INVALID_ARGUMENT),
    ("{{ ''.__class__.__mro__ }}", ErrorKind.INVALID_ARGUMENT),
    ("{{ raise_exception('no') }}", ErrorKind.INVALID_ARGUMENT),
)


@pytest.fixture(params=["vllm", "sglang"])
async def stub(request: pytest.FixtureRequest) -> AsyncIterator[preprocess_pb2_grpc.PreprocessAsyncStub]:
    engine: str = request.param
    listen = f"127.0.0.1:{free_port()}"
    flags = ["--listen", listen, "--models", f"tiny={tiny_folder()}", f"--{engine}-processing", "--drain-s", "1"]
    settings = PreprocessSettings.load([*flags, f"--{engine}-python", python(engine), "--engine-processes", "2"])
    stop = Stop()
    serving = asyncio.ensure_future(preprocess.serve(settings, stop))
    channel = open_channel(listen)
    try:
        await asyncio.wait_for(channel.channel_ready(), 60)
        made: Any = preprocess_pb2_grpc.PreprocessStub(channel)
        yield made
    finally:
        await channel.close()
        stop.set()
        await serving
    assert engine_processes() == []


def engine_processes() -> list[psutil.Process]:
    mine = psutil.Process().children()
    return [child for child in mine if any("engines.host" in word for word in child.cmdline())]


def chat(text: str, **more: Any) -> pb.TokenizeRequest:
    messages = json.dumps([{"role": "user", "content": text}]).encode()
    return pb.TokenizeRequest(model="tiny", chat=pb.ChatInput(messages_json=messages, **more))


async def test_killed_processes_lose_no_request(stub: preprocess_pb2_grpc.PreprocessAsyncStub) -> None:
    await stub.Tokenize(chat("warm"), timeout=180)

    async def one(index: int) -> bool:
        text = f"number {index} " * (1 + index * 7)
        reply = await stub.Tokenize(chat(text), timeout=180)
        return unpack_u32(reply.token_ids).tolist() == tiny_hf().encode_chat(
            ChatRequest([{"role": "user", "content": text}])
        )

    calls = [asyncio.ensure_future(one(index)) for index in range(REQUESTS)]
    done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert done
    assert waiting
    killed = engine_processes()
    assert len(killed) == 2
    for process in killed:
        process.kill()
    assert all(await asyncio.gather(*calls))


async def test_hostile_template_returns_a_typed_error_and_delays_no_other_request(
    stub: preprocess_pb2_grpc.PreprocessAsyncStub,
) -> None:
    expected = (await stub.Tokenize(chat("hi"), timeout=180)).token_ids
    for template, kind in HOSTILE:
        call = stub.Tokenize(chat("hi", chat_template=template), timeout=180)
        hostile = asyncio.ensure_future(refused(call, within_s=200))
        while not hostile.done():
            assert (await stub.Tokenize(chat("hi"), timeout=60)).token_ids == expected
            await asyncio.sleep(0.05)
        error = hostile.result()
        assert error.kind is kind or error.kind is ErrorKind.INTERNAL, (template, error.message)
        assert "Traceback" not in error.message


async def test_facts_and_special_text_equal_those_of_the_engine(stub: preprocess_pb2_grpc.PreprocessAsyncStub) -> None:
    await stub.Tokenize(chat("hi"), timeout=180)
    (info,) = (await stub.ListModels(pb.ListTokenizersRequest())).models
    facts = tiny_hf().facts
    assert info.tokenizer.processor in ("vllm", "sglang")
    assert info.tokenizer.fingerprint == facts.fingerprint
    assert (info.vocab_size, info.context_length) == (facts.vocab_size, facts.context_length)
    typed = "<|im_end|> <|im_start|>"
    reply = await stub.Tokenize(chat(typed), timeout=60)
    assert unpack_u32(reply.token_ids).tolist() == tiny_hf().encode_chat(
        ChatRequest([{"role": "user", "content": typed}])
    )
    assert (await stub.Detokenize(pb.DetokenizeRequest(model="tiny", token_ids=reply.token_ids))).text
