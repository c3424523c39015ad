"""Event streams: text goes out on the spot, slow clients are held back and finally cut, nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

from starlette.types import Message

from services.common.base.errors import SluiceError, unavailable
from services.common.net.http.connection import ABORT_KEY
from services.gateway.apis.openai.choices import ChunkedChoice, CollectedChoices, StreamedChoices
from services.gateway.apis.openai.completion_objects import ChatFormat, CompletionFormat
from services.gateway.apis.openai.detailed_choices import DetailedStreamedChoice, DetailOptions
from services.gateway.core.request import Finish, FinishReason
from services.gateway.http.keepalive import KeepaliveMonitor
from services.gateway.http.sse import EventStream
from services.gateway.http.write_scheduler import WriteScheduler
from services.gateway.operations.logprobs import Naming
from services.gateway.operations.operation import EventListener
from tests.support.waiting import settle, until


class Client:
    """An ASGI client whose reading can be stopped."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.left = asyncio.Event()

    async def send(self, message: Message) -> None:
        if not self.reads.is_set():
            await self.reads.wait()
        self.messages.append(message)

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def events(self) -> list[Any]:
        lines = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


def same(error: SluiceError) -> SluiceError:
    return error


def make(number: int = 1, usage: bool = False, max_unsent: int = 1000) -> tuple[StreamedChoices, EventStream]:
    choices = StreamedChoices(ChatFormat("chatcmpl-1", 1, "m", usage), number, usage, same)
    return choices, EventStream(choices, WriteScheduler(), max_unsent)


def serve(stream: EventStream, client: Client) -> asyncio.Task[None]:
    return asyncio.create_task(stream({"type": "http"}, client.receive, client.send))


def served(**options: Any) -> tuple[StreamedChoices, Client, asyncio.Task[None]]:
    choices, stream = make(**options)
    client = Client()
    return choices, client, serve(stream, client)


async def settle_round() -> None:
    await asyncio.sleep(0.12)  # longer than the longest pause between rounds


STOP = Finish(FinishReason.STOP, completion_tokens=2)


async def test_chunks_of_a_chat_in_order() -> None:
    choices, client, serving = served(usage=True)
    choices.sinks[0].text("Hel")
    await settle_round()
    choices.sinks[0].text('lo "ü"\n')
    await settle_round()
    choices.sinks[0].finish(STOP)
    await asyncio.wait_for(serving, 30)
    role, first, second, closing, counts, done = client.events
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["choices"][0]["delta"] == {"content": "Hel"}
    assert first["usage"] is None
    assert second["choices"][0]["delta"] == {"content": 'lo "ü"\n'}
    assert closing["choices"][0]["finish_reason"] == "stop"
    assert closing["choices"][0]["delta"] == {}
    assert counts["choices"] == []
    assert counts["usage"]["total_tokens"] == 0
    assert done == "[DONE]"
    assert client.messages[-1]["more_body"] is False
    assert b"content-length" not in dict(client.messages[0]["headers"])


async def test_text_that_waits_becomes_one_event() -> None:
    choices, client, serving = served()
    for piece in ("a", "b", "c"):
        choices.sinks[0].text(piece)
    choices.sinks[0].finish(STOP)
    await asyncio.wait_for(serving, 30)
    assert [event["choices"][0]["delta"].get("content") for event in client.events[:-1]] == ["", "abc", None]


async def test_choices_keep_apart() -> None:
    choices, client, serving = served(number=2)
    choices.sinks[1].text("second")
    await settle_round()
    choices.sinks[0].text("first")
    choices.sinks[1].finish(STOP)
    await settle_round()
    assert not serving.done()
    choices.sinks[0].finish(Finish(FinishReason.LENGTH))
    await asyncio.wait_for(serving, 30)
    texts = {0: "", 1: ""}
    reasons = {}
    for event in client.events[:-1]:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "first", 1: "second"}
    assert reasons == {0: "length", 1: "stop"}


async def test_failure_before_the_first_text_is_an_http_error() -> None:
    choices, client, serving = served()
    choices.sinks[0].fail(unavailable("no worker"))
    await asyncio.wait_for(serving, 30)
    assert client.status == 503
    assert json.loads(client.body)["error"]["message"] == "no worker"


async def test_failure_in_the_middle_is_an_event_and_the_end() -> None:
    choices, client, serving = served()
    choices.sinks[0].text("so far")
    await settle()
    choices.sinks[0].fail(unavailable("worker lost"))
    await asyncio.wait_for(serving, 30)
    assert client.status == 200
    assert client.events[-2]["error"]["message"] == "worker lost"
    assert client.events[-1] == "[DONE]"


async def test_slow_client_receives_everything_without_blocking_the_source() -> None:
    choices, client, serving = served(max_unsent=10_000)
    choices.sinks[0].text("a")
    await settle()
    client.reads.clear()
    for _ in range(500):
        choices.sinks[0].text("b")
    await settle_round()
    choices.sinks[0].text("c")
    choices.sinks[0].finish(STOP)
    client.reads.set()
    await asyncio.wait_for(serving, 30)
    content = "".join(event["choices"][0]["delta"].get("content", "") for event in client.events[:-1])
    assert content == "a" + "b" * 500 + "c"
    assert client.events[-1] == "[DONE]"


async def test_a_client_that_never_reads_is_cut() -> None:
    cancelled = []
    choices, client, serving = served(max_unsent=100)
    choices.cancel = lambda: cancelled.append(True)  # type: ignore[method-assign]
    choices.sinks[0].text("a")
    await settle()
    client.reads.clear()
    choices.sinks[0].text("b")
    await settle_round()
    for _ in range(200):
        choices.sinks[0].text("c")
    await asyncio.wait_for(serving, 30)
    assert cancelled


async def test_client_that_never_reads_is_cut_for_an_unsent_choice() -> None:
    choices, stream = make(2, max_unsent=100)
    client = Client()
    serving = serve(stream, client)
    choices.sinks[0].text("a")
    await settle()
    client.reads.clear()
    choices.sinks[0].text("b")
    await settle_round()
    assert stream.blocked
    for _ in range(200):
        choices.sinks[1].text("c")
    await asyncio.wait_for(serving, 30)
    assert not choices.sinks


async def test_a_stream_that_fails_to_write_is_cut_and_disturbs_no_other() -> None:
    write_scheduler, cut = WriteScheduler(), []
    broken, sound = make(), make()
    for choices, stream in (broken, sound):
        stream._write_scheduler = write_scheduler
        choices.sinks[0].text("a")
    clients = Client(), Client()
    scope = {"type": "http", ABORT_KEY: lambda: cut.append(True)}
    serving = [
        asyncio.create_task(stream(scope, client.receive, client.send))
        for (_, stream), client in zip((broken, sound), clients, strict=True)
    ]
    await settle()

    def fails() -> bytes:
        raise ValueError("a defect")

    broken[0].take = fails  # type: ignore[method-assign]
    broken[0].sinks[0].text("b")
    sound[0].sinks[0].text("b")
    await asyncio.wait_for(serving[0], 30)
    sound[0].sinks[0].finish(STOP)
    await asyncio.wait_for(serving[1], 30)
    assert cut == [True]
    assert clients[1].events[-1] == "[DONE]"


async def test_stream_that_fails_at_its_first_text_is_cut_without_an_error_for_the_source() -> None:
    choices, _, serving = served(number=2)
    choices.sinks[0].text("a")
    await settle()

    def fails() -> bytes:
        raise ValueError("a defect")

    choices.take = fails  # type: ignore[method-assign]
    choices.sinks[1].text("b")  # else the session that brings everybody's text would end
    await asyncio.wait_for(serving, 30)


async def test_a_client_that_leaves_cancels() -> None:
    cancelled = []
    choices, client, serving = served()
    choices.cancel = lambda: cancelled.append(True)  # type: ignore[method-assign]
    choices.sinks[0].text("a")
    await settle()
    client.left.set()
    await asyncio.wait_for(serving, 30)
    assert cancelled
    before = len(client.messages)
    choices.sinks[0].text("too late")
    await settle_round()
    assert len(client.messages) == before


async def test_a_broken_connection_ends_the_stream() -> None:
    choices, stream = make()
    client = Client()

    async def broken(message: Message) -> None:
        if message["type"] == "http.response.body":
            raise OSError("gone")

    serving = asyncio.create_task(stream({"type": "http"}, client.receive, broken))
    choices.sinks[0].text("a")
    await asyncio.wait_for(serving, 30)


def test_chunks_are_valid_json_whatever_the_text() -> None:
    for form in (ChatFormat("i", 1, 'm"\\', True), CompletionFormat("i", 1, 'm"\\', False)):
        before, after = form.text_affixes(3)
        chunk = json.loads((before + json.dumps('"\\\n\u2028😀').encode() + after).removeprefix(b"data: "))
        assert chunk["model"] == 'm"\\'
        assert chunk["choices"][0]["index"] == 3
        closing = json.loads(form.finish_chunk(0, Finish(FinishReason.STOP, stop_string='"x')).removeprefix(b"data: "))
        assert closing["choices"][0]["stop_reason"] == '"x'


async def test_reasoning_text_and_calls_keep_their_order_and_wait_together() -> None:
    choices, client, serving = served(usage=True)
    sink = choices.sinks[0]
    for piece in ("hm ", '"ü"'):
        sink.reasoning(piece)
    sink.text("Well")
    sink.tool_call(0, "call_a", "f", "")
    sink.tool_call(0, "", "", '{"a"')
    sink.tool_call(0, "", "", ": 1}")
    sink.tool_call(1, "call_b", "g", "{}")
    sink.text("?")
    sink.finish(Finish(FinishReason.TOOL_CALLS, degraded=("tool_call_malformed",)))
    await asyncio.wait_for(serving, 30)
    deltas = [event["choices"][0]["delta"] for event in client.events[:-2]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": 'hm "ü"', "reasoning": 'hm "ü"'},
        {"content": "Well"},
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": "call_a",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"a": 1}'},
                }
            ]
        },
        {
            "tool_calls": [
                {"index": 1, "id": "call_b", "type": "function", "function": {"name": "g", "arguments": "{}"}}
            ]
        },
        {"content": "?"},
        {},
    ]
    closing, counts = client.events[-3]["choices"][0], client.events[-2]["usage"]
    assert (closing["finish_reason"], closing["degraded"]) == ("tool_calls", ["tool_call_malformed"])
    assert counts["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_arguments_go_out_as_they_come() -> None:
    choices, client, serving = served()
    sink = choices.sinks[0]
    sink.tool_call(0, "call_a", "f", "")
    await settle_round()
    sink.tool_call(0, "", "", '{"a')
    await settle_round()
    sink.tool_call(0, "", "", '":1}')
    sink.finish(STOP)
    await asyncio.wait_for(serving, 30)
    calls = [event["choices"][0]["delta"].get("tool_calls") for event in client.events[1:4]]
    assert [call[0]["function"]["arguments"] for call in calls] == ["", '{"a', '":1}']
    assert [("id" in call[0], "name" in call[0]["function"]) for call in calls] == [(True, True), *[(False, False)] * 2]


def test_a_whole_answer_carries_reasoning_and_calls() -> None:
    choices = CollectedChoices(1, same)
    sink = choices.sinks[0]
    sink.reasoning("a")
    sink.reasoning("b")
    sink.tool_call(0, "x", "f", "{")
    sink.tool_call(1, "y", "g", "{}")
    sink.tool_call(0, "", "", "}")
    sink.finish(Finish(FinishReason.TOOL_CALLS))
    choice = ChatFormat("chatcmpl-1", 1, "m", False).full_response(choices.results(), {})["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert "degraded" not in choice
    message = choice["message"]
    assert message["content"] is None
    assert (message["reasoning_content"], message["reasoning"]) == ("ab", "ab")
    assert message["tool_calls"] == [
        {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "y", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]


async def test_usage_so_far_counts_prompts_that_have_no_ids() -> None:
    asked = DetailOptions(continuous_usage=True)

    def choice(index: int, events: StreamedChoices) -> ChunkedChoice:
        return DetailedStreamedChoice(index, events, asked, Naming({}))

    choices = StreamedChoices(CompletionFormat("cmpl-1", 1, "m", True), 3, True, same, make=choice)
    EventStream(choices, WriteScheduler(), 1000)
    of_embeddings = SimpleNamespace(choices=2, prompt_tokens=70)  # rows; there are no ids
    choices.usage.generations += cast(Any, [of_embeddings, SimpleNamespace(choices=1, prompt_tokens=5)])
    for sink in choices.sinks:
        cast(DetailedStreamedChoice, sink).begin([])
        sink.text("a")
    events = [json.loads(event.removeprefix(b"data: ")) for event in choices.take().split(b"\n\n")[:-1]]
    assert [(event["choices"][0]["index"], event["usage"]["prompt_tokens"]) for event in events] == [
        (0, 70),
        (1, 70),
        (2, 5),
    ]


async def test_client_that_leaves_before_the_head_is_answered_for_those_who_observe() -> None:
    _, client, serving = served()
    await settle()
    client.left.set()
    await asyncio.wait_for(serving, 30)
    assert client.status == 499


class News:
    """A source that has one event at first, and then nothing."""

    unsent = 0
    over = False
    failure = None

    def __init__(self) -> None:
        self.events = [b"event: begin\n\n"]

    def attach(self, listener: EventListener) -> None:
        pass

    def take(self) -> bytes:
        return self.events.pop() if self.events else b""

    def silence(self) -> bytes:
        return b"event: alive\n\n"

    def cancel(self) -> None:
        pass


async def test_source_says_how_its_silence_is_sent() -> None:
    client = Client()
    stream = EventStream(News(), WriteScheduler(KeepaliveMonitor(0.1, 60)), 1000)
    serving = serve(stream, client)
    await until(lambda: client.body.count(b"alive") >= 2)
    client.left.set()
    await asyncio.wait_for(serving, 30)
    assert client.body.startswith(b"event: begin\n\nevent: alive\n\nevent: alive\n\n")
