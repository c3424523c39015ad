"""Choices that show more than their text: log-probabilities, token ids, usage in every chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from services.gateway.apis.openai.choices import CollectedChoice, CollectedChoices, StreamedChoice, StreamedChoices
from services.gateway.apis.openai.completion_objects import Answer, Detail, Format, usage
from services.gateway.apis.openai.logprobs import Naming, ShownToken, prompt_logprobs
from services.gateway.core.request import Finish


@dataclass(frozen=True, slots=True)
class DetailOptions:
    """What a request wants to hear besides text.

    Attributes:
        logprobs: of the answer's tokens, and of the prompt's where it is echoed.
        prompt_logprobs: of the prompt's tokens, by themselves.
        token_ids: of prompt and answer.
        continuous_usage: every chunk says what was used so far.
        only_prompt: nothing of the answer.
        echo: the prompt's text comes first.
        echo_logprobs: and what its tokens' probabilities are.
    """

    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    continuous_usage: bool = False
    only_prompt: bool = False
    echo: bool = False
    echo_logprobs: bool = False

    @property
    def any(self) -> bool:
        """Whether choices have to show more than their text."""
        return self.logprobs or self.prompt_logprobs or self.token_ids or self.continuous_usage or self.only_prompt


class DetailedStreamedChoice(StreamedChoice):
    """A streamed choice; what waits of its tokens goes out with the next chunk that there is."""

    __slots__ = ("_naming", "_prompt_ids", "_prompt_ids_due", "_seen", "_tokens", "_wishes")

    def __init__(self, index: int, events: StreamedChoices, detail_options: DetailOptions, naming: Naming) -> None:
        super().__init__(index, events)
        self._wishes = detail_options
        self._naming = naming
        self._tokens: list[ShownToken] = []
        self._seen = 0
        self._prompt_ids_due = True
        self._prompt_ids: Sequence[int] = ()

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """See TokenSink."""
        self._prompt_ids = prompt_ids

    def shown(self, tokens: Sequence[ShownToken]) -> None:
        """See TokenSink."""
        self._tokens += tokens
        self._seen += len(tokens)

    def shown_prompt(self, tokens: Sequence[ShownToken]) -> None:
        """See TokenSink."""
        if self._wishes.echo_logprobs:
            self._tokens += tokens

    def _text_event(self, text: str) -> bytes:
        return self._events.form.text(self.index, text, self._detail())

    def _opening_detail(self) -> Detail:
        if not self._wishes.token_ids:
            return self._usage_detail(b"null", b"")
        ids = b',"prompt_token_ids":' + orjson.dumps(list(self._prompt_ids))
        return self._usage_detail(b"null", b"", ids)

    def _detail(self) -> Detail:
        tokens, self._tokens = self._tokens, []
        logprobs = of_choice = b""
        if self._wishes.logprobs and tokens:
            logprobs = orjson.dumps(self._events.form.logprobs(tokens, self._naming))
        if self._wishes.token_ids:
            of_choice = b',"token_ids":' + orjson.dumps([token.token_id for token in tokens])
            if self._events.form.prompt_in_choice and self._prompt_ids_due:
                of_choice += b',"prompt_token_ids":' + orjson.dumps(list(self._prompt_ids))
                self._prompt_ids_due = False
        return self._usage_detail(logprobs or b"null", of_choice)

    def _usage_detail(self, logprobs: bytes, of_choice: bytes, of_chunk: bytes = b"") -> Detail:
        if self._wishes.continuous_usage:
            counts = usage(self._events.usage.prompt_tokens(self.index), self._seen, 0)
            return Detail(logprobs, of_choice, of_chunk + b',"usage":' + orjson.dumps(counts))
        return Detail(logprobs, of_choice, of_chunk + self._events.form.null_usage if of_chunk else None)


class DetailedCollectedChoice(CollectedChoice):
    """A choice of an answer that is not streamed."""

    def __init__(self, choices: CollectedChoices, form: Format, detail_options: DetailOptions, naming: Naming) -> None:
        super().__init__(choices)
        self._form = form
        self._wishes = detail_options
        self._naming = naming
        self._tokens: list[ShownToken] = []
        self._prompt: Sequence[ShownToken] = ()
        self._prompt_ids: Sequence[int] = ()

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """See TokenSink."""
        self._prompt_ids = prompt_ids

    def shown(self, tokens: Sequence[ShownToken]) -> None:
        """See TokenSink."""
        self._tokens += tokens

    def shown_prompt(self, tokens: Sequence[ShownToken]) -> None:
        """See TokenSink."""
        self._prompt = tokens

    def answer(self, finish: Finish) -> Answer:
        """What was said, with what was asked for."""
        answer = super().answer(finish)
        more: dict[str, Any] = {}
        if self._wishes.token_ids:
            more["token_ids"] = [token.token_id for token in self._tokens]
        if self._form.prompt_in_choice:
            more |= self.of_prompt()
        logprobs = None
        if self._wishes.logprobs:
            tokens = [*self._prompt, *self._tokens] if self._wishes.echo_logprobs else self._tokens
            logprobs = self._form.logprobs(tokens, self._naming)
        return Answer(answer.text, answer.finish, answer.reasoning, answer.calls, logprobs, more)

    def of_prompt(self) -> dict[str, Any]:
        """What is said of the prompt."""
        said: dict[str, Any] = {}
        if self._wishes.token_ids:
            said["prompt_token_ids"] = list(self._prompt_ids)
        if self._wishes.prompt_logprobs:
            said["prompt_logprobs"] = prompt_logprobs(self._prompt, self._naming)
        return said
