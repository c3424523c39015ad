"""Choices of chat completions and completions: streamed as chunks, or collected."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import orjson

from services.common.base.errors import SluiceError
from services.gateway.apis.openai.completion_objects import (
    DONE,
    PLAIN,
    CompletedChoice,
    Detail,
    Format,
    ToolCall,
    error_event,
    usage,
)
from services.gateway.core.request import Finish
from services.gateway.core.request_size import LOGPROB_VALUES
from services.gateway.operations.output import CollectedResponse, FieldRenamer, StreamedChoice, StreamedResponse


class ChunkedChoice(StreamedChoice):
    """A choice that is streamed as chunks."""

    __slots__ = ("_after", "_before", "_form", "index")

    def __init__(self, index: int, choices: StreamedChoices) -> None:
        super().__init__(choices)
        self.index = index
        self._form = choices.form
        self._before, self._after = choices.form.text_affixes(index)

    def _opening_detail(self) -> Detail:
        """Returns the extra fields of the first chunk."""
        return PLAIN

    def _detail(self) -> Detail:
        """Returns the extra fields of the next chunk."""
        return PLAIN

    def _encode_opening(self) -> bytes:
        return self._form.role_chunk(self.index, self._opening_detail())

    def _encode_text(self, piece: str) -> bytes:
        return self._before + orjson.dumps(piece) + self._after

    def _encode_reasoning(self, piece: str) -> bytes:
        return self._form.reasoning(self.index, piece, self._detail())

    def _encode_call(self, call: int, call_id: str, name: str, arguments: str) -> bytes:
        return self._form.tool_call(self.index, call, call_id, name, arguments, self._detail())

    def _encode_finish(self, finish: Finish) -> bytes:
        return self._form.finish_chunk(self.index, finish, self._detail())


class StreamedChoices(StreamedResponse):
    """The event source of a streamed response.

    Args:
        make: creates choices with details beyond their text; None for plain choices.
    """

    def __init__(
        self,
        form: Format,
        number: int,
        include_usage: bool,
        rename_fields: FieldRenamer,
        drop_reasoning: bool = False,
        prompt_only: bool = False,
        make: Callable[[int, StreamedChoices], ChunkedChoice] | None = None,
    ) -> None:
        super().__init__(rename_fields, drop_reasoning, prompt_only)
        self.form = form
        self.sinks = [(make or ChunkedChoice)(index, self) for index in range(number)]
        self._include_usage = include_usage

    def _encode_end(self) -> bytes:
        return self.form.usage_event(usage(self.usage.counts())) + DONE if self._include_usage else DONE

    def _encode_failure(self, error: SluiceError) -> bytes:
        return error_event(error) + DONE


class CollectedChoice:
    """One choice of a collected response."""

    def __init__(self, choices: CollectedChoices) -> None:
        self.pieces: list[str] = []
        self.reasoning_pieces: list[str] = []
        self.calls: dict[int, tuple[str, str, list[str]]] = {}
        self.result: Finish | None = None
        self._choices = choices

    def text(self, piece: str) -> None:
        """See Sink."""
        self.pieces.append(piece)

    def reasoning(self, piece: str) -> None:
        """See Sink."""
        if not self._choices.drop_reasoning:
            self.reasoning_pieces.append(piece)

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        """See Sink."""
        self.calls.setdefault(call, (call_id, name, []))[2].append(arguments)

    def choice(self, finish: Finish) -> CompletedChoice:
        """Returns the completed choice."""
        calls = [ToolCall(call_id, name, "".join(pieces)) for call_id, name, pieces in self.calls.values()]
        return CompletedChoice("".join(self.pieces), finish, "".join(self.reasoning_pieces), calls)

    def finish(self, finish: Finish) -> None:
        """See Sink."""
        self.result = finish
        self._choices.choice_ended()

    def fail(self, error: SluiceError) -> None:
        """See Sink; fails the whole response."""
        self._choices.fail(error)


class CollectedChoices(CollectedResponse):
    """Collects the choices of a response.

    Args:
        make: creates choices with details beyond their text; None for plain choices.
    """

    def __init__(
        self,
        number: int,
        rename_fields: FieldRenamer,
        drop_reasoning: bool = False,
        prompt_only: bool = False,
        make: Callable[[CollectedChoices], CollectedChoice] | None = None,
    ) -> None:
        super().__init__(rename_fields, prompt_only)
        self.drop_reasoning = drop_reasoning
        self._sinks = [(make or CollectedChoice)(self) for _ in range(number)]
        self._open = number
        self._logprobs = 0

    @property
    def sinks(self) -> Sequence[CollectedChoice]:
        """The choices, until `cancel`."""
        return self._sinks

    def add_logprobs(self, values: int) -> None:
        """Counts log-probabilities that the response will have; too many of all choices together fail it."""
        self._logprobs += values
        try:
            LOGPROB_VALUES.check(
                self._logprobs,
                "The log-probabilities of a response that is not streamed, for each token and its alternatives,",
                param="logprobs",
            )
        except SluiceError as error:
            self.fail(error)

    def choice_ended(self) -> None:
        """Counts an ended choice."""
        self._open -= 1
        if self._open == 0:
            self._done.set()

    def cancel(self) -> None:
        """Cancels the generations, and breaks the reference cycle of response and choices."""
        super().cancel()
        self._sinks.clear()

    def results(self) -> Sequence[CompletedChoice]:
        """Returns the completed choices; raises SluiceError if one failed."""
        self.check()
        return [sink.choice(sink.result) for sink in self._sinks if sink.result is not None]
