"""Text, chats and text out through a worker: what the separate services make, id for id and character for character."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind
from services.common.base.packing import pack_u32, unpack_u32
from services.common.packages.model_files import ModelSpec
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.common.rpc.server import GrpcServer
from services.gateway.backends.rpc.preprocess import TokenizerIdentity
from services.gateway.backends.workers.tokenizer_parity import DIFFERS, PROVEN, compare
from services.postprocess.detokenize.stream import Limits
from services.postprocess.service import PostprocessService
from services.postprocess.settings import PostprocessSettings
from services.postprocess.streams.factory import StreamFactory
from services.postprocess.streams.session import SessionLimits
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry
from services.preprocess.service import PreprocessService
from services.preprocess.settings import PreprocessSettings
from services.preprocess.thread_pool import ComputePool
from services.preprocess.tokenizers.loading import load_tokenizer
from services.preprocess.tokenizers.probes import prompt_fingerprint
from services.preprocess.tokenizers.registry import ModelRegistry
from services.worker.local_processing.processing import Processing
from services.worker.local_processing.prompts import PromptMaker
from services.worker.server import WorkerServer
from services.worker.settings import PromptBounds
from sluice.conformance import Patience, Target, Verdict, run, select
from sluice.v1 import (
    common_pb2,
    postprocess_pb2,
    postprocess_pb2_grpc,
    preprocess_pb2,
    preprocess_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.support.data.chat_matrix import chats, texts
from tests.support.data.loaded_tokenizers import limits, tiny_folder, tiny_hf
from tests.support.data.tiny_models import CHATML
from tests.support.servers.workers import Caller, generation, hosted, stub_of
from tests.support.waiting import until

LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP
CANCELLED, ERROR = common_pb2.FINISH_REASON_CANCELLED, common_pb2.FINISH_REASON_ERROR
CHAT = {"messages": [{"role": "user", "content": "What is the weather in Paris today?"}]}


@dataclass
class Services:
    """A worker that does everything, and the services that do it otherwise."""

    worker: worker_pb2_grpc.WorkerAsyncStub
    preprocess: preprocess_pb2_grpc.PreprocessAsyncStub
    postprocess: postprocess_pb2_grpc.PostprocessAsyncStub


@dataclass
class Answer:
    """One request's answer, whichever way it came."""

    token_ids: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    finish: postprocess_pb2.StreamEvent | None = None
    terminal: worker_pb2.TokenExtra | None = None

    def take(self, delta: worker_pb2.GenerateDelta) -> None:
        assert self.terminal is None, "nothing comes after the end"
        self.token_ids += unpack_u32(delta.token_ids)
        extra = delta.extra
        if extra.prompt_token_ids:
            assert not self.prompt, "the prompt is told once"
            self.prompt = unpack_u32(extra.prompt_token_ids).tolist()
        for event in extra.events:
            assert event.slot == 0
            assert self.finish is None
            self.text += event.text
            self.reasoning += event.reasoning
            for call in event.tool_calls:
                known = self.calls.setdefault(call.index, [call.id, call.name, ""])
                known[2] += call.arguments
            if event.finish_reason:
                self.finish = event
        if extra.finish_reason:
            self.terminal = extra

    @property
    def end(self) -> worker_pb2.TokenExtra:
        assert self.terminal is not None
        return self.terminal


@asynccontextmanager
async def services() -> AsyncIterator[Services]:
    spec = f"tiny={tiny_folder()}"
    pre_settings = PreprocessSettings.load(["--listen", "127.0.0.1:0", "--models", spec])
    post_settings = PostprocessSettings.load(["--listen", "127.0.0.1:0", "--models", spec])
    pool = ComputePool(2, 8, 8192, 30)
    library = VocabularyRegistry(post_settings.served, 60)
    registry = ModelRegistry(pre_settings.served, lambda spec: tiny_hf())
    pre, post = (
        GrpcServer(pre_settings, preprocess_pb2.DESCRIPTOR),
        GrpcServer(post_settings, postprocess_pb2.DESCRIPTOR),
    )
    preprocess_pb2_grpc.add_PreprocessServicer_to_server(PreprocessService(registry, pool, 4 << 20), pre.server)
    service = PostprocessService(library, SessionLimits(), StreamFactory(Limits()))
    postprocess_pb2_grpc.add_PostprocessServicer_to_server(service, post.server)
    await pre.start()
    await post.start()
    channels = [open_channel(f"127.0.0.1:{server.port}") for server in (pre, post)]
    try:
        async with hosted(tiny_folder(), processing="full") as host, stub_of(host) as worker:
            yield Services(
                worker,
                preprocess_pb2_grpc.PreprocessStub(channels[0]),
                postprocess_pb2_grpc.PostprocessStub(channels[1]),
            )
    finally:
        for channel in channels:
            await channel.close()
        await pre.stop(0.1)
        await post.stop(0.1)
        pool.close()


async def generate(worker: worker_pb2_grpc.WorkerAsyncStub, request: worker_pb2.GenerateRequest) -> Answer:
    answer = Answer()
    async for delta in worker.Generate(request):
        answer.take(delta)
    return answer


def of_chat(chat: dict[str, Any], request_id: str = "r", **more: Any) -> worker_pb2.GenerateRequest:
    body = json.dumps({"model": "tiny", "temperature": 2.0, **chat}).encode()
    return worker_pb2.GenerateRequest(request_id=request_id, model="tiny", messages_json=body, **more)


def input_of(chat: dict[str, Any]) -> preprocess_pb2.ChatInput:
    def part(name: str) -> bytes:
        return json.dumps(chat[name]).encode() if name in chat else b""

    return preprocess_pb2.ChatInput(
        messages_json=part("messages"),
        tools_json=part("tools"),
        template_kwargs_json=part("chat_template_kwargs"),
        add_generation_prompt=chat.get("add_generation_prompt"),
        continue_final_message=chat.get("continue_final_message", False),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], list[str], bool]:
    """A chat, stop strings, and whether its answer is a tool call or reasoning."""
    chat = draw(chats())
    scripted = draw(st.booleans())
    if scripted:
        script = '<think>so</think>Yes.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ü"}}\n</tool_call>'
        chat["messages"].append({"role": "user", "content": f"<<<script: {script}>>>"})
        chat.pop("continue_final_message", None)
        chat.pop("add_generation_prompt", None)
    return chat, draw(st.lists(st.sampled_from(("e", "th", " a", "Yes", "}}", ".")), max_size=2, unique=True)), scripted


@settings(max_examples=8, deadline=None)
@given(batch=st.lists(cases(), min_size=4, max_size=8))
async def test_a_chat_through_the_worker_equals_the_separate_services(
    batch: list[tuple[dict[str, Any], list[str], bool]],
) -> None:
    async with services() as suite:
        for number, (chat, stops, scripted) in enumerate(batch):
            options = postprocess_pb2.StreamOptions(stop=stops)
            if scripted:
                options.tool_parser, options.reasoning_parser = "hermes", "deepseek_r1"
            limit = common_pb2.StopOptions(max_tokens=60)
            request = of_chat(chat, f"r{number}", stop=limit, postprocess=options)
            try:
                made = await suite.preprocess.Tokenize(
                    preprocess_pb2.TokenizeRequest(model="tiny", chat=input_of(chat))
                )
            except grpc.aio.AioRpcError as error:
                refused = from_rpc_error(error, "preprocess")
                ours = await generate(suite.worker, request)
                assert (ErrorKind(ours.end.error.kind), ours.end.error.param) == (refused.kind, refused.param)
                assert ours.end.error.message == refused.message
                continue
            ours = await generate(suite.worker, request)
            await _equal(suite, ours, made, chat, options, request)


async def _equal(
    suite: Services,
    ours: Answer,
    made: preprocess_pb2.TokenizeResponse,
    chat: dict[str, Any],
    options: postprocess_pb2.StreamOptions,
    request: worker_pb2.GenerateRequest,
) -> None:
    """The prompt, the tokens and what they became are those of the services one by one."""
    assert ours.prompt == unpack_u32(made.token_ids).tolist()
    plain = generation(request.request_id, ours.prompt, max_tokens=request.stop.max_tokens)
    plain.stop.eos_token_ids, plain.stop.stop_token_ids = made.eos_token_ids, made.stop_token_ids
    theirs = await generate(suite.worker, plain)
    options = postprocess_pb2.StreamOptions.FromString(options.SerializeToString())
    options.model, options.prompt_tail = "tiny", made.prompt_tail
    options.eos_token_ids, options.stop_token_ids = made.eos_token_ids, made.stop_token_ids
    options.tools_json = json.dumps(chat["tools"]).encode() if "tools" in chat else b""
    parsed = await suite.postprocess.Parse(
        postprocess_pb2.ParseRequest(
            options=options, token_ids=pack_u32(theirs.token_ids), finish_reason=theirs.end.finish_reason
        )
    )
    assert ours.finish is not None
    assert ours.token_ids == theirs.token_ids[: parsed.finish.tokens_seen]
    assert (ours.text, ours.reasoning) == (parsed.text, parsed.reasoning)
    assert [call[1:] for call in ours.calls.values()] == [[call.name, call.arguments] for call in parsed.tool_calls]
    assert (ours.finish.stop_string, ours.finish.finish_reason, ours.finish.reasoning_tokens) == (
        parsed.finish.stop_string,
        parsed.finish.finish_reason,
        parsed.finish.reasoning_tokens,
    )
    assert ours.end.finish_reason == (STOP if parsed.finish.stop_string else theirs.end.finish_reason)
    assert ours.end.usage.completion_tokens == len(ours.token_ids)
    assert ours.end.usage.prompt_tokens == len(ours.prompt)


@settings(max_examples=8, deadline=None)
@given(batch=st.lists(texts, min_size=4, max_size=8))
async def test_text_through_the_worker_has_the_ids_of_preprocess(batch: list[str]) -> None:
    async with services() as suite:
        for number, text in enumerate(batch):
            asked = preprocess_pb2.TokenizeRequest(model="tiny", text=preprocess_pb2.TextInput(text=text))
            made = await suite.preprocess.Tokenize(asked)
            limit = common_pb2.StopOptions(max_tokens=1)
            request = worker_pb2.GenerateRequest(request_id=f"t{number}", model="tiny", text=text, stop=limit)
            ours = await generate(suite.worker, request)
            assert ours.prompt == unpack_u32(made.token_ids).tolist()
            if not ours.prompt:
                assert ours.end.error.param == "prompt"
                continue
            assert ours.end.finish_reason == LENGTH


@pytest.fixture
async def host() -> AsyncIterator[WorkerServer]:
    async with hosted(tiny_folder(), processing="full") as host:
        yield host


async def test_on_a_session_all_kinds_go_side_by_side(host: WorkerServer) -> None:
    async with stub_of(host) as stub:
        caller = Caller(stub)
        options = postprocess_pb2.StreamOptions()
        starts = {slot: of_chat(CHAT, f"m{slot}", postprocess=options) for slot in range(20)}
        starts |= {slot: of_chat(CHAT, f"m{slot}") for slot in range(20, 40)}
        starts |= {slot: generation(f"m{slot}") for slot in range(40, 60)}
        await caller.send(starts)
        await caller.ended(*starts)
        assert {len(caller.token_ids[slot]) for slot in range(40)} == {len(caller.token_ids[0])}
        assert {terminal.finish_reason for terminal in caller.terminals.values()} == {STOP}
        await caller.close()


@pytest.mark.parametrize(
    ("request_", "kind", "param"),
    [
        (of_chat({"messages": [{"role": "robot", "content": ""}]}), ErrorKind.INVALID_ARGUMENT, "messages[0].role"),
        (of_chat({**CHAT, "tools": {}}), ErrorKind.INVALID_ARGUMENT, "tools"),
        (of_chat({**CHAT, "chat_template": "{{ 1 / 0 }}"}), ErrorKind.INVALID_ARGUMENT, "chat_template"),
        (of_chat({**CHAT, "chat_template": "{% for a in b %}"}), ErrorKind.INVALID_ARGUMENT, "chat_template"),
        (of_chat({"messages": [{"role": "user", "content": "word " * 5000}]}), ErrorKind.INVALID_ARGUMENT, "messages"),
        (of_chat({"messages": [{"role": "user", "content": "x" * (5 << 20)}]}), ErrorKind.TOO_LARGE, "messages"),
        (
            worker_pb2.GenerateRequest(request_id="r", model="tiny", text="word " * 5000),
            ErrorKind.INVALID_ARGUMENT,
            "prompt",
        ),
        (of_chat(CHAT, resumed_tokens=1), ErrorKind.INVALID_ARGUMENT, "resumed_tokens"),
        (
            of_chat(CHAT, postprocess=postprocess_pb2.StreamOptions(stop=[""])),
            ErrorKind.INVALID_ARGUMENT,
            "stop",
        ),
        (
            of_chat(CHAT, postprocess=postprocess_pb2.StreamOptions(prompt_tail=b"abc")),
            ErrorKind.INVALID_ARGUMENT,
            "postprocess.prompt_tail",
        ),
    ],
    ids=["role", "tools", "raises", "syntax", "long", "large", "text", "resumed", "stop", "packed"],
)
async def test_what_is_wrong_is_named_and_the_next_request_works(
    host: WorkerServer, request_: worker_pb2.GenerateRequest, kind: ErrorKind, param: str
) -> None:
    async with stub_of(host) as stub:
        caller = Caller(stub)
        await caller.send({1: request_})
        await caller.ended(1)
        assert caller.terminals[1].finish_reason == ERROR
        error = caller.terminals[1].error
        assert (ErrorKind(error.kind), error.param) == (kind, param)
        assert "Traceback" not in error.message
        assert 1 not in caller.token_ids
        await caller.send({2: of_chat(CHAT, "after", postprocess=postprocess_pb2.StreamOptions())})
        await caller.ended(2)
        assert caller.terminals[2].finish_reason == STOP
        await caller.close()
        assert host.worker.live_requests == 0


def processing_of(host: WorkerServer) -> Processing:
    """Returns the processing of a worker by the extension."""
    assert isinstance(host.worker.processing, Processing)
    return host.worker.processing


class AdmissionGate:
    """Holds tokenizing up."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = 0

    def hold(self, host: WorkerServer, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = processing_of(host)._tokenizer
        pack = tokenizer.pack_text  # type: ignore[union-attr]

        def held(text: str, add_special_tokens: bool | None = None) -> bytes:
            self.entered += 1
            assert self.open.wait(60)
            return pack(text, add_special_tokens)

        monkeypatch.setattr(tokenizer, "pack_text", held)


@pytest.fixture
def gate(host: WorkerServer, monkeypatch: pytest.MonkeyPatch) -> AdmissionGate:
    gate = AdmissionGate()
    gate.hold(host, monkeypatch)
    return gate


def held(request_id: str) -> worker_pb2.GenerateRequest:
    return worker_pb2.GenerateRequest(request_id=request_id, model="tiny", text="Hello")


async def test_a_cancel_in_the_middle_of_tokenizing_is_active_at_once(host: WorkerServer, gate: AdmissionGate) -> None:
    async with stub_of(host) as stub:
        caller = Caller(stub)
        await caller.send({slot: held(f"r{slot}") for slot in range(6)})
        await until(lambda: gate.entered >= 2 and host.worker.live_requests == 6)
        await caller.send(cancels=[0, 3])
        assert (await stub.Abort(worker_pb2.AbortRequest(request_id="r4"))).found
        await caller.ended(0, 3, 4)
        assert {caller.terminals[slot].finish_reason for slot in (0, 3, 4)} == {CANCELLED}
        await caller.send({6: held("r0")})  # the id is free again
        gate.open.set()
        await caller.ended(1, 2, 5, 6)
        assert {caller.terminals[slot].finish_reason for slot in (1, 2, 5, 6)} == {STOP}
        assert not {0, 3, 4} & caller.token_ids.keys()
        await caller.close()


async def test_a_caller_who_leaves_meanwhile_leaves_nothing_behind(host: WorkerServer, gate: AdmissionGate) -> None:
    async with stub_of(host) as stub:
        caller = Caller(stub)
        await caller.send({0: held("r0")})
        call = stub.Generate(held("r1"))
        await until(lambda: gate.entered == 2)
        await caller.close()
        call.cancel()
        await until(lambda: host.worker.live_requests == 0)
        assert len(processing_of(host)._preparing) == 0
        gate.open.set()
        answer = await generate(stub, held("r2"))
        assert answer.end.finish_reason == STOP


async def test_a_worker_that_shuts_down_finishes_what_it_tokenizes(gate: AdmissionGate, host: WorkerServer) -> None:
    async with stub_of(host) as stub:
        caller = Caller(stub)
        await caller.send({0: held("r0")})
        await until(lambda: gate.entered == 1)
        draining = asyncio.create_task(host.worker.drain(20))
        await asyncio.sleep(0)
        await caller.send({1: held("r1")})
        await caller.ended(1)
        assert ErrorKind(caller.terminals[1].error.kind) is ErrorKind.ENGINE_SHUTDOWN
        gate.open.set()
        await caller.ended(0)
        await draining
        assert caller.terminals[0].finish_reason == STOP
        await caller.close()


async def test_prompts_that_wait_are_bounded_in_memory(host: WorkerServer, gate: AdmissionGate) -> None:
    processing = processing_of(host)
    assert processing._tokenizer is not None
    processing._prompts = PromptMaker(processing._tokenizer, PromptBounds(max_held_bytes=64_000))
    async with stub_of(host) as stub:
        caller = Caller(stub)
        texts = {slot: held(f"r{slot}") for slot in range(200)}
        for request in texts.values():
            request.text = "x" * 1_000
        await caller.send(texts)
        await until(lambda: len(caller.terminals) == 136)
        assert {ErrorKind(terminal.error.kind) for terminal in caller.terminals.values()} == {ErrorKind.OVERLOADED}
        gate.open.set()
        await caller.ended(*texts)
        await caller.close()
    await until(lambda: processing._prompts is not None and processing._prompts.held_bytes == 0)


def identity(of: str, template: str = "") -> TokenizerIdentity:
    tokenizer = load_tokenizer(ModelSpec("tiny", of, chat_template=template), limits())
    return TokenizerIdentity("hf", tokenizer.facts.fingerprint, prompt_fingerprint(tokenizer))


@dataclass
class Said:
    """What a card says, as parity wants it."""

    fingerprint: str
    prompt_fingerprint: str
    media_fingerprint: str = ""


async def card_of(host: WorkerServer) -> common_pb2.ModelCard:
    async with stub_of(host) as stub:
        return (await stub.GetInfo(worker_pb2.GetInfoRequest())).card


async def test_the_card_proves_the_prompts_and_a_changed_template_differs(tmp_path: Path) -> None:
    changed = tmp_path / "changed.jinja"
    changed.write_text(CHATML.replace("assistant\\n", "assistant: "), "utf-8")
    ours = identity(str(tiny_folder()))
    for template, parity in ((None, PROVEN), (changed, DIFFERS)):
        async with hosted(tiny_folder(), processing="prompts", chat_template=template) as host:
            tokenizer = (await card_of(host)).tokenizer
        assert tokenizer.fingerprint == ours.fingerprint
        assert compare(ours, Said(tokenizer.fingerprint, tokenizer.prompt_fingerprint)) == parity


@pytest.mark.parametrize(
    ("level", "claimed"),
    [("none", set[str]()), ("prompts", {"text", "messages"}), ("full", {"text", "messages", "text_out"})],
)
async def test_what_is_done_stands_on_the_card_and_the_rest_is_refused(level: str, claimed: set[str]) -> None:
    async with hosted(tiny_folder(), processing=level) as host, stub_of(host) as stub:
        card = await card_of(host)
        assert claimed == {"text", "messages", "text_out"} & set(card.capabilities)
        assert bool(card.tokenizer.prompt_fingerprint) == bool(claimed)
        requests = {
            "text": worker_pb2.GenerateRequest(request_id="t", model="tiny", text="Hello"),
            "messages": of_chat(CHAT, "m"),
            "text_out": generation("o"),
        }
        requests["text_out"].postprocess.SetInParent()
        for capability, request in requests.items():
            if capability in claimed:
                assert (await generate(stub, request)).end.finish_reason == STOP
                continue
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await generate(stub, request)
            assert from_rpc_error(raised.value, "worker").code == "unsupported_by_engine"


async def test_the_conformance_kit_finds_what_is_claimed(host: WorkerServer) -> None:
    rules = select(("text-prompt", "messages-prompt", "text-out"))
    target = Target(f"127.0.0.1:{host.server.port}")
    report = await run(target, rules, Patience().times(10))
    assert {result.rule.name: result.verdict for result in report.results} == {
        rule.name: Verdict.PASSED for rule in rules
    }
