"""Runs cases on Sluice and on the engines, a batch at a time on all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.postprocess.detokenize.vocabulary import ParserNames
from services.preprocess.contract.tokenizer import ChatRequest
from tests.certificate.answers import names_for
from tests.certificate.changes import SWITCHES
from tests.certificate.comparison import Comparison, compare
from tests.certificate.plan import AnswerCase, Case, Cell, PromptCase, cases, model_of
from tests.certificate.sides.side import Side
from tests.certificate.sides.sluice import SluiceSide
from tests.certificate.templates import EOS, MISTRAL, READ_MISTRAL
from tests.support.data.parser_corpus import TOOLS

Change = Callable[[ChatRequest], ChatRequest]
BodyChange = Callable[[dict[str, Any]], dict[str, Any]]
BATCH = 64


class Run:
    """One run.

    Args:
        ours: Sluice.
        engines: the other sides.
        folders: of the models, by template.
        formats: parsers by format.
    """

    def __init__(
        self,
        ours: SluiceSide,
        engines: Sequence[Side],
        folders: Mapping[str, Path],
        formats: Mapping[str, ParserNames],
    ) -> None:
        self._ours, self._engines, self._folders, self._formats = ours, engines, folders, formats
        first = next(iter(folders.values()))
        self._bytes = Tokenizer.from_file(str(first / "tokenizer.json"))
        self._eos = self._bytes.token_to_id(EOS)
        self.count = 0

    def cell(self, cell: Cell, count: int, seed: int) -> Iterator[Comparison]:
        """Compares the first `count` cases of a cell."""
        drawn = itertools.islice(cases(cell, self._formats, seed), count)
        while batch := list(itertools.islice(drawn, BATCH)):
            self.count += len(batch)
            yield from self._batch(cell, batch)

    def _batch(self, cell: Cell, batch: Sequence[Case]) -> Iterator[Comparison]:
        asked: list[tuple[Side, list[int]]] = []
        for engine in self._engines:
            questions = [self._question(case, engine) for case in batch]
            places = [place for place, question in enumerate(questions) if question is not None]
            if places:
                engine.send([questions[place] for place in places])  # type: ignore[misc]
                asked.append((engine, places))
        if not asked:
            return
        self._ours.send([self.body(case, case.names if isinstance(case, AnswerCase) else None) for case in batch])
        ours = self._ours.receive()
        for engine, places in asked:
            for place, theirs in zip(places, engine.receive(), strict=True):
                found = compare(batch[place], engine.name, ours[place], theirs, self._text_of(cell))
                if found is not None:
                    yield found

    def changed(
        self, case: PromptCase, changes: Iterable[Change], body_changes: Iterable[BodyChange] = ()
    ) -> list[int] | None:
        """Returns Sluice's ids of a case after changes of its body and then of its chat; None if that is refused."""
        question = self.body(case)
        for change in body_changes:
            question["body"] = change(question["body"])
        return self._ours.changed(question, changes)

    def _question(self, case: Case, engine: Side) -> dict[str, Any] | None:
        if case.cell.subject in MISTRAL and engine.name not in READ_MISTRAL:
            return None
        if isinstance(case, PromptCase):
            return self.body(case, None) if case.cell.api in engine.apis else None
        if "answers" not in engine.apis:
            return None
        if engine.name == "vllm" and case.cell.subject == "harmony":
            return None  # it reads the ids of o200k_harmony, which is no tokenizer of bytes
        names = names_for(engine.name, case.cell.subject, case.names)
        complete = bool(names.tool) >= bool(case.names.tool) and bool(names.reasoning) >= bool(case.names.reasoning)
        return self.body(case, names) if complete else None

    def body(self, case: Case, names: ParserNames | None = None) -> dict[str, Any]:
        model = model_of(case.cell, self._folders)
        if isinstance(case, PromptCase):
            return {"kind": "prompt", "model": model, "api": case.cell.api, "body": case.body}
        assert names is not None
        ids = self._bytes.encode(case.answer.text, add_special_tokens=False).ids
        return {
            "kind": "answer",
            "model": model,
            "tool": names.tool,
            "reasoning": names.reasoning,
            "tools": TOOLS if case.answer.tools else [],
            "ids": ids,
            "eos": self._eos,
            "finish": case.answer.finish,
            "kwargs": {} if case.answer.thinks is None else dict.fromkeys(SWITCHES, case.answer.thinks),
        }

    def _text_of(self, cell: Cell) -> Any:
        model = model_of(cell, self._folders)
        return self._ours.tokenizer(model).decode
