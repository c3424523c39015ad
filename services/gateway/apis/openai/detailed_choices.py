"""Choices with details beyond their text: log-probabilities, token ids, usage in every chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from services.gateway.apis.openai.choices import ChunkedChoice, CollectedChoice, CollectedChoices, StreamedChoices
from services.gateway.apis.openai.completion_objects import CompletedChoice, Detail, Format, usage
from services.gateway.core.request import Finish
from services.gateway.operations.logprobs import Naming, TokenText, prompt_logprobs
from services.gateway.operations.output import Counts
from services.gateway.operations.runner import ShownTokens


@dataclass(frozen=True, slots=True)
class DetailOptions:
    """The details that a request selects.

    Attributes:
        logprobs: log-probabilities of the generated tokens.
        prompt_logprobs: log-probabilities of the prompt's tokens, as a field of its own.
        token_ids: token ids of prompt and output.
        continuous_usage: usage so far in every chunk.
        prompt_only: return the prompt's details only, no output.
        echo: the text starts with the prompt.
        echo_logprobs: `logprobs` includes the echoed prompt.
    """

    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    continuous_usage: bool = False
    prompt_only: bool = False
    echo: bool = False
    echo_logprobs: bool = False

    @property
    def any(self) -> bool:
        """Whether any detail is selected that plain choices lack."""
        return self.logprobs or self.prompt_logprobs or self.token_ids or self.continuous_usage or self.prompt_only

    @property
    def shown(self) -> ShownTokens:
        """What of them is about single tokens."""
        return ShownTokens(self.any, self.echo, self.prompt_only)


class DetailedStreamedChoice(ChunkedChoice):
    """A streamed choice; pending tokens are sent with the next chunk."""

    __slots__ = ("_naming", "_options", "_prompt_ids", "_prompt_ids_due", "_token_count", "_tokens")

    def __init__(self, index: int, choices: StreamedChoices, options: DetailOptions, naming: Naming) -> None:
        super().__init__(index, choices)
        self._options = options
        self._naming = naming
        self._tokens: list[TokenText] = []
        self._token_count = 0
        self._prompt_ids_due = True
        self._prompt_ids: Sequence[int] = ()

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """See TokenSink."""
        self._prompt_ids = prompt_ids

    def shown(self, tokens: Sequence[TokenText]) -> None:
        """See TokenSink."""
        self._tokens += tokens
        self._token_count += len(tokens)

    def shown_prompt(self, tokens: Sequence[TokenText]) -> None:
        """See TokenSink."""
        if self._options.echo_logprobs:
            self._tokens += tokens

    def _encode_text(self, piece: str) -> bytes:
        return self._form.text(self.index, piece, self._detail())

    def _opening_detail(self) -> Detail:
        if not self._options.token_ids:
            return self._usage_detail(b"null", b"")
        ids = b',"prompt_token_ids":' + orjson.dumps(list(self._prompt_ids))
        return self._usage_detail(b"null", b"", ids)

    def _detail(self) -> Detail:
        tokens, self._tokens = self._tokens, []
        logprobs = of_choice = b""
        if self._options.logprobs and tokens:
            logprobs = orjson.dumps(self._form.logprobs(tokens, self._naming))
        if self._options.token_ids:
            of_choice = b',"token_ids":' + orjson.dumps([token.token_id for token in tokens])
            if self._form.prompt_in_choice and self._prompt_ids_due:
                of_choice += b',"prompt_token_ids":' + orjson.dumps(list(self._prompt_ids))
                self._prompt_ids_due = False
        return self._usage_detail(logprobs or b"null", of_choice)

    def _usage_detail(self, logprobs: bytes, of_choice: bytes, of_chunk: bytes = b"") -> Detail:
        if self._options.continuous_usage:
            counts = usage(Counts(self._response.usage.prompt_tokens(self.index), self._token_count))
            return Detail(logprobs, of_choice, of_chunk + b',"usage":' + orjson.dumps(counts))
        return Detail(logprobs, of_choice, of_chunk + self._form.null_usage if of_chunk else None)


class DetailedCollectedChoice(CollectedChoice):
    """A collected choice."""

    def __init__(self, choices: CollectedChoices, form: Format, options: DetailOptions, naming: Naming) -> None:
        super().__init__(choices)
        self._form = form
        self._options = options
        self._naming = naming
        self._tokens: list[TokenText] = []
        self._prompt: Sequence[TokenText] = ()
        self._prompt_ids: Sequence[int] = ()

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """See TokenSink."""
        self._prompt_ids = prompt_ids

    def shown(self, tokens: Sequence[TokenText]) -> None:
        """See TokenSink."""
        self._tokens += tokens
        self._choices.add_logprobs(_values(tokens))

    def shown_prompt(self, tokens: Sequence[TokenText]) -> None:
        """See TokenSink."""
        self._prompt = tokens
        self._choices.add_logprobs(_values(tokens))

    def choice(self, finish: Finish) -> CompletedChoice:
        """Returns the completed choice with the selected details."""
        choice = super().choice(finish)
        extra: dict[str, Any] = {}
        if self._options.token_ids:
            extra["token_ids"] = [token.token_id for token in self._tokens]
        if self._form.prompt_in_choice:
            extra |= self.prompt_fields()
        logprobs = None
        if self._options.logprobs:
            tokens = [*self._prompt, *self._tokens] if self._options.echo_logprobs else self._tokens
            logprobs = self._form.logprobs(tokens, self._naming)
        return CompletedChoice(choice.text, choice.finish, choice.reasoning, choice.calls, logprobs, extra)

    def prompt_fields(self) -> dict[str, Any]:
        """Returns the selected fields about the prompt."""
        fields: dict[str, Any] = {}
        if self._options.token_ids:
            fields["prompt_token_ids"] = list(self._prompt_ids)
        if self._options.prompt_logprobs:
            fields["prompt_logprobs"] = prompt_logprobs(self._prompt, self._naming)
        return fields


def _values(tokens: Sequence[TokenText]) -> int:
    """Returns the number of log-probabilities of tokens and of their alternatives."""
    return sum(1 + len(token.position.top) for token in tokens if token.position is not None)
