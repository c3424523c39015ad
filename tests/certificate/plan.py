"""The cases of a run: which conversations and answers are compared, by whom, in batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.postprocess.detokenize.vocabulary import ParserNames
from tests.certificate.answers import FEATURES as ANSWER_FEATURES
from tests.certificate.answers import Answer, answer, pairs
from tests.certificate.bodies import APIS, Body
from tests.certificate.conversations import FEATURES, Conversation, conversation

ANSWERS = "answers"
"""The API of answers, which all APIs have alike."""


@dataclass(frozen=True)
class Cell:
    """A place in the report: a template, or a parser's format, with an API and a feature."""

    subject: str
    api: str
    feature: str


@dataclass(frozen=True)
class PromptCase:
    """A conversation for a template as a body of an API."""

    cell: Cell
    conversation: Conversation
    body: Body


@dataclass(frozen=True)
class AnswerCase:
    """An answer and the built-in parsers of its format."""

    cell: Cell
    answer: Answer
    names: ParserNames


Case = PromptCase | AnswerCase


def prompt_cells(templates: Sequence[str]) -> list[Cell]:
    return [
        Cell(template, api, feature)
        for template in templates
        for api in APIS
        for feature in FEATURES
        if APIS[api](conversation(feature, 0)) is not None or APIS[api](conversation(feature, 1)) is not None
    ]


def answer_cells(formats: Mapping[str, ParserNames]) -> list[Cell]:
    return [
        Cell(name, ANSWERS, feature)
        for name, names in formats.items()
        for feature in ANSWER_FEATURES
        if answer(name, names, feature, 0) is not None
    ]


def cases(cell: Cell, formats: Mapping[str, ParserNames], seed: int) -> Iterator[Case]:
    """The cases of a cell in which there are some, without end; the same for the same seed."""
    for number in itertools.count():
        if cell.api == ANSWERS:
            names = formats[cell.subject]
            made = answer(cell.subject, names, cell.feature, number, seed)
            if made is not None:
                yield AnswerCase(cell, made, names)
            continue
        chat = conversation(cell.feature, number, seed)
        body = APIS[cell.api](chat)
        if body is not None:
            yield PromptCase(cell, chat, body)


def formats() -> dict[str, ParserNames]:
    """See `answers.pairs`."""
    return pairs()


def model_of(cell: Cell, folders: Mapping[str, Path]) -> str:
    """The folder of a cell's tokenizer; answers have that of every template."""
    return str(folders[cell.subject] if cell.api != ANSWERS else next(iter(folders.values())))
