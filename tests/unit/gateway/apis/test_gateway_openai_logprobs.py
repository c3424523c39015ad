"""Tokens shown beside text: the order stays, nothing is lost, whichever question is answered when."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError, unavailable
from services.common.base.tasks import TaskOwner
from services.gateway.backends.rpc.token_bytes import TokenPieces
from services.gateway.core.request import Finish, FinishReason, PositionLogprobs, TokenLogprob
from services.gateway.operations.logprobs import TokenText
from services.gateway.operations.logprobs_assembler import LogprobsAssembler
from tests.support.waiting import settle

STOP = Finish(FinishReason.STOP, completion_tokens=2)


class Pieces:
    """Knows every id as the text `<id>`, after a while."""

    def __init__(self, error: Exception | None = None) -> None:
        self.known: dict[int, bytes] = {}
        self.asked: list[set[int]] = []
        self.answers = asyncio.Semaphore(0)
        self.error = error

    def of(self, model: str) -> dict[int, bytes]:
        return self.known

    async def learn(self, model: str, token_ids: Iterable[int]) -> None:
        self.asked.append(set(token_ids))
        await self.answers.acquire()
        if self.error is not None:
            raise self.error
        self.known.update({token_id: b"<%d>" % token_id for token_id in self.asked[-1]})


class Choice:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.heard.append(("begin", list(prompt_ids)))

    def shown(self, tokens: Sequence[TokenText]) -> None:
        self.heard.append(("shown", list(tokens)))

    def shown_prompt(self, tokens: Sequence[TokenText]) -> None:
        self.heard.append(("prompt", list(tokens)))

    def text(self, piece: str) -> None:
        self.heard.append(("text", piece))

    def reasoning(self, piece: str) -> None:
        self.heard.append(("reasoning", piece))

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        self.heard.append(("call", arguments))

    def finish(self, finish: Finish) -> None:
        self.heard.append(("finish", finish))

    def fail(self, error: SluiceError) -> None:
        self.heard.append(("fail", error))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.heard]


def position(token_id: int, *others: int) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(token_id, -0.5), tuple(TokenLogprob(other, -1.5) for other in others))


def make(pieces: Pieces, **options: Any) -> tuple[LogprobsAssembler, Choice]:
    choice = Choice()
    return LogprobsAssembler(choice, cast(TokenPieces, pieces), "m", TaskOwner(), **options), choice


async def test_without_alternatives_nothing_is_asked() -> None:
    pieces = Pieces()
    assembler, choice = make(pieces)
    assembler.begin(array("I", [7]), [1])
    assembler.logprobs([position(7)])
    assembler.tokens([b"x"], [0])
    assembler.text("x")
    assembler.finish(STOP)
    assert choice.heard == [
        ("begin", [1]),
        ("shown", [TokenText(7, b"x", 0, position(7))]),
        ("text", "x"),
        ("finish", STOP),
    ]
    assert pieces.asked == []


async def test_everything_waits_while_alternatives_are_asked_for() -> None:
    pieces = Pieces()
    assembler, choice = make(pieces)
    assembler.begin(array("I", [7, 8]), [1])
    assembler.logprobs([position(7, 7, 30), position(8, 31)])
    assembler.tokens([b"a"], [0])
    assembler.text("a")
    assembler.tokens([b"b"], [1])
    assembler.text("b")
    assembler.finish(STOP)
    await settle()
    assert choice.kinds == ["begin"]
    pieces.answers.release()
    await settle()
    assert choice.kinds == ["begin", "shown", "text"]
    pieces.answers.release()
    await settle()
    assert choice.kinds == ["begin", "shown", "text", "shown", "text", "finish"]
    assert pieces.asked == [{7, 30}, {31}]


async def test_a_question_without_an_answer_fails_the_choice_once() -> None:
    pieces = Pieces(unavailable("No postprocess replica is ready."))
    assembler, choice = make(pieces)
    assembler.begin(array("I", [7]), [1])
    assembler.logprobs([position(7, 30)])
    assembler.tokens([b"a"], [0])
    assembler.text("a")
    pieces.answers.release()
    await settle()
    assembler.text("b")
    assembler.finish(STOP)
    assert choice.kinds == ["begin", "fail"]


async def test_invalid_token_texts_fail_the_choice() -> None:
    pieces = Pieces(ValueError("zip() argument 2 is shorter than argument 1"))
    assembler, choice = make(pieces)
    assembler.begin(array("I", [7]), [1])
    assembler.logprobs([position(7, 30)])
    assembler.tokens([b"a"], [0])
    assembler.finish(STOP)
    pieces.answers.release()
    await settle()
    assert choice.kinds == ["begin", "fail"]
    assert choice.heard[-1][1].kind is ErrorKind.INTERNAL


async def test_an_echoed_prompt_comes_with_its_tokens_and_moves_the_offsets() -> None:
    pieces = Pieces()
    pieces.known = {1: b"<s>", 2: b" Hi", 3: b" \xf0\x9f", 4: b"\x9a\xa2", 9: b"no"}
    assembler, choice = make(pieces, prompt_logprobs=True)
    assembler.echo("Hi 🚢")
    assembler.begin(array("I", [5]), [1, 2, 3, 4])
    assembler.prompt_logprobs([position(2, 9), position(3), position(4)])
    assembler.tokens([b"!"], [0])
    assembler.text("!")
    assert choice.kinds == ["begin", "prompt", "text", "shown", "text"]
    prompt = choice.heard[1][1]
    assert [(token.token_id, token.offset) for token in prompt] == [(1, 0), (2, 0), (3, 2), (4, 3)]
    assert prompt[0].position is None
    assert prompt[1].position == position(2, 9)
    assert choice.heard[2] == ("text", "Hi 🚢")
    assert choice.heard[3][1][0].offset == 4


@pytest.mark.parametrize("count", [3, 4])
async def test_prompt_logprobs_with_or_without_the_first_token_are_equal(count: int) -> None:
    pieces = Pieces()
    pieces.known = dict.fromkeys(range(10), b"x")
    assembler, choice = make(pieces, prompt_logprobs=True)
    assembler.begin(array("I"), [1, 2, 3, 4])
    assembler.prompt_logprobs([position(token) for token in [1, 2, 3, 4][-count:]])
    chosen = [token.position and token.position.chosen.token_id for token in choice.heard[1][1]]
    assert chosen == [None, 2, 3, 4]


async def test_only_the_prompt_leaves_the_answer_out() -> None:
    assembler, choice = make(Pieces(), prompt_only=True)
    assembler.echo("Hi")
    assembler.begin(array("I", [5]), [1])
    assembler.tokens([b"!"], [0])
    assembler.text("!")
    assembler.finish(STOP)
    assert choice.kinds == ["begin", "text", "finish"] or choice.kinds == ["text", "begin", "finish"]
    assert choice.heard[-1][1].reason is FinishReason.LENGTH


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(50, 60), max_size=3)), max_size=20),
    st.randoms(use_true_random=False),
)
def test_the_order_stays_whichever_answer_comes_when(steps: list[tuple[int, list[int]]], random: Any) -> None:
    async def run() -> None:
        pieces = Pieces()
        assembler, choice = make(pieces)
        ids = array("I")
        begin_at = random.randrange(len(steps) + 1)
        expected: list[tuple[int, bytes]] = []
        for index, (number, others) in enumerate(steps):
            if index == begin_at:
                assembler.begin(ids, [1])
            first = len(ids)
            ids.extend(range(first, first + number))
            assembler.logprobs([position(first + place, *others) for place in range(number)])
            texts = [b"%d," % (first + place) for place in range(number)]
            assembler.tokens(texts, [0] * number)
            assembler.text(b"".join(texts).decode())
            expected += [(first + place, text) for place, text in enumerate(texts)]
            if random.random() < 0.4:
                pieces.answers.release()
                await settle()
        if begin_at == len(steps):
            assembler.begin(ids, [1])
        assembler.finish(STOP)
        for _ in range(len(steps) + 1):
            pieces.answers.release()
            await settle()
        shown = [token for kind, tokens in choice.heard if kind == "shown" for token in tokens]
        assert [(token.token_id, token.piece) for token in shown] == expected
        assert all(token.position is not None and token.position.chosen.token_id == token.token_id for token in shown)
        assert (
            "".join(said for kind, said in choice.heard if kind == "text")
            == b"".join(piece for _, piece in expected).decode()
        )
        assert choice.kinds == ["begin", *["shown", "text"] * len(steps), "finish"]

    asyncio.run(run())
