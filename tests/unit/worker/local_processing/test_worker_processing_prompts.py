"""Prompts are made off the event loop, within bounds of number, memory and time, and can be given up."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.tasks import TaskOwner
from services.postprocess.detokenize.stream import StreamOptions
from services.preprocess.contract.generation_defaults import GenerationDefaults
from services.preprocess.contract.tokenizer import TokenizerFacts
from services.preprocess.tokenizers.hf import HfTokenizer
from services.worker.contract.generation import GenerateRequest, SamplingParams, StopParams
from services.worker.local_processing.completing import completed
from services.worker.local_processing.preparing import PromptPreparation
from services.worker.local_processing.prompts import PromptMaker
from services.worker.settings import PromptBounds
from tests.support.data.loaded_tokenizers import tiny_hf
from tests.support.oracles.errors import raises_error
from tests.support.waiting import until

MESSAGES = [{"role": "user", "content": "What is the weather?"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


class Gated(HfTokenizer):
    """The tiny tokenizer, which waits for leave and tells where it ran."""

    def __init__(self) -> None:
        self.leave = threading.Event()
        self.threads: set[int] = set()
        self.facts = tiny_hf().facts

    def pack_text(self, text: str, add_special_tokens: bool | None = None) -> bytes:
        self.threads.add(threading.get_ident())
        assert self.leave.wait(60)
        return tiny_hf().pack_text(text, add_special_tokens)


@pytest.fixture
def gated() -> Iterator[Gated]:
    tokenizer = Gated()
    yield tokenizer
    tokenizer.leave.set()


def text(content: str, request_id: str = "r") -> GenerateRequest:
    return GenerateRequest(request_id, "tiny", text=content)


def chat(**fields: object) -> GenerateRequest:
    return GenerateRequest("r", "tiny", messages_json=json.dumps({"messages": MESSAGES, **fields}).encode())


async def test_nothing_is_computed_on_the_event_loop(gated: Gated) -> None:
    maker = PromptMaker(gated, PromptBounds())
    making = asyncio.create_task(maker.make(text("a")))
    await until(lambda: bool(gated.threads))
    assert not making.done()
    gated.leave.set()
    await making
    assert threading.get_ident() not in gated.threads


async def test_prompt_above_the_limit_raises_an_error_that_names_its_field() -> None:
    maker = PromptMaker(tiny_hf(), PromptBounds(max_prompt_bytes=100))
    for request, param in ((text("x" * 101), "prompt"), (chat(chat_template="x" * 200), "messages")):
        with raises_error(kind=ErrorKind.TOO_LARGE, param=param):
            await maker.make(request)
    assert maker.held_bytes == 0


async def test_what_waits_is_bounded_in_number(gated: Gated) -> None:
    maker = PromptMaker(gated, PromptBounds(threads=1, max_waiting=1))
    waiting = [asyncio.create_task(maker.make(text("x"))) for _ in range(2)]
    await until(lambda: maker.held_bytes == 2)
    with raises_error(kind=ErrorKind.OVERLOADED):
        await maker.make(text("x"))
    gated.leave.set()
    await asyncio.gather(*waiting)


async def test_a_prompt_that_takes_too_long_is_a_typed_error(gated: Gated) -> None:
    maker = PromptMaker(gated, PromptBounds(limit_s=0.05))
    with raises_error(kind=ErrorKind.DEADLINE_EXCEEDED):
        await maker.make(text("x"))
    assert maker.held_bytes == 0


async def test_a_request_that_is_given_up_is_neither_gone_on_with_nor_failed() -> None:
    received: list[object] = []
    begun, leave = asyncio.Event(), asyncio.Event()

    async def prepare(request: GenerateRequest) -> GenerateRequest:
        begun.set()
        await leave.wait()
        return request

    tasks = TaskOwner()
    preparing = PromptPreparation(prepare, tasks)
    preparing.start(text("a", "one"), received.append, received.append)
    preparing.start(text("b", "two"), received.append, received.append)
    await begun.wait()
    assert preparing.give_up("one")
    assert not preparing.give_up("one")
    leave.set()
    await until(lambda: tasks.alive == 0)
    assert [request.request_id for request in received if isinstance(request, GenerateRequest)] == ["two"]
    assert len(received) == 1
    assert len(preparing) == 0


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (SluiceError(ErrorKind.NOT_FOUND, "No."), ErrorKind.NOT_FOUND),
        (ValueError("a user's class"), ErrorKind.INTERNAL),
    ],
)
async def test_any_failure_of_a_prompt_is_a_typed_error(raised: Exception, kind: ErrorKind) -> None:
    received: list[SluiceError] = []

    async def prepare(request: GenerateRequest) -> GenerateRequest:
        raise raised

    def go_on(request: GenerateRequest) -> None:
        raise AssertionError("there is nothing to go on with")

    tasks = TaskOwner()
    PromptPreparation(prepare, tasks).start(text("a"), go_on, received.append)
    await until(lambda: bool(received))
    assert received[0].kind is kind
    assert "a user's class" not in received[0].message


FACTS = TokenizerFacts(
    "hf",
    "",
    1024,
    eos_ids=(2,),
    stop_ids=(7,),
    defaults=GenerationDefaults(temperature=0.6, top_k=20, max_tokens=50),
)


async def made_of(request: GenerateRequest, context_length: int = 4096) -> GenerateRequest:
    maker = PromptMaker(tiny_hf(), PromptBounds())
    return completed(request, await maker.make(request), FACTS, context_length)


async def test_unset_options_take_the_defaults_of_the_models_files() -> None:
    request = await made_of(text("a b c"))
    assert request.sampling == SamplingParams(temperature=0.6, top_k=20)
    assert request.stop == StopParams(max_tokens=50, stop_token_ids=frozenset({7}), eos_token_ids=(2,))
    assert (request.text, request.messages_json) == (None, None)
    own = replace(text("a b c"), sampling=SamplingParams(temperature=0), stop=StopParams(max_tokens=3, ignore_eos=True))
    request = await made_of(own)
    assert request.sampling == SamplingParams(temperature=0, top_k=20)
    assert request.stop == StopParams(max_tokens=3, eos_token_ids=(2,), ignore_eos=True)


async def test_a_recommended_length_is_cut_to_what_fits() -> None:
    length = len(tiny_hf().encode_text("a b c"))
    assert (await made_of(text("a b c"), context_length=length + 10)).stop.max_tokens == 10
    assert (await made_of(text("a b c"), context_length=0)).stop.max_tokens == 50


async def test_the_text_knows_its_prompt_and_the_chats_tools() -> None:
    asked = chat(tools=TOOLS, tool_choice="auto", chat_template_kwargs={"a": 1}, parallel_tool_calls=False)
    request = await made_of(replace(asked, text_out=StreamOptions("tiny", stop=("x",), tool_parser="auto")))
    options = request.text_out
    assert options is not None
    assert list(options.prompt_tail) == request.token_ids[-16:].tolist()
    assert json.loads(options.tools_json) == TOOLS
    assert (options.tool_choice_json, options.template_kwargs_json) == (b'"auto"', b'{"a":1}')
    assert options.single_tool_call
    assert (options.stop, options.tool_parser) == (("x",), "auto")
    assert (options.eos_token_ids, options.stop_token_ids) == (frozenset({2}), frozenset({7}))


async def test_explicit_text_options_take_precedence() -> None:
    said = StreamOptions("tiny", prompt_tail=(1, 2), tools_json=b"[]", eos_token_ids=frozenset({9}), min_tokens=4)
    request = await made_of(replace(chat(tools=TOOLS), text_out=said))
    options = request.text_out
    assert options is not None
    assert (options.prompt_tail, options.tools_json, options.min_tokens) == ((1, 2), b"[]", 4)
    assert options.eos_token_ids == frozenset({9})
