"""One generation's way from token ids to text, up to its end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from services.common.errors import SluiceError
from services.postprocess.detokenize.detokenizer import Detokenizer
from services.postprocess.detokenize.stops import StopScanner, compile_stops
from services.postprocess.detokenize.token_texts import TokenRecorder
from services.postprocess.detokenize.vocabulary import Vocabulary

NO_MARKERS: frozenset[str] = frozenset()


class FinishReason(IntEnum):
    """The numbers of `sluice.v1.FinishReason`."""

    UNSPECIFIED = 0
    STOP = 1
    LENGTH = 2
    TOOL_CALLS = 3
    CANCELLED = 4
    ERROR = 5
    HANDOFF = 6


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a stream's tokens become text; see `sluice.v1.StreamOptions` for the meaning of each."""

    model: str
    skip_special_tokens: bool = True
    stop: tuple[str, ...] = ()
    include_stop_string: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    ignore_eos: bool = False
    prompt_tail: Sequence[int] = ()
    tool_parser: str = ""
    reasoning_parser: str = ""
    tools_json: bytes = b""
    tool_choice_json: bytes = b""
    single_tool_call: bool = False
    guided: bool = False
    token_texts: bool = False
    template_kwargs_json: bytes = b""
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one stream; see the settings of the same names."""

    max_stop_strings: int = 1_000
    max_stop_chars: int = 8_192
    max_tools_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Finish:
    """How a stream ended: at most one of stop_string, stop_token_id and error is set."""

    reason: FinishReason
    tokens_seen: int
    stop_string: str = ""
    stop_token_id: int | None = None
    error: SluiceError | None = None
    reasoning_tokens: int = 0

    def parsed(self, calls: bool, reasoning_tokens: int) -> Finish:
        """The same for a stream whose parser found tool calls or not; one that was cut off stays cut off."""
        reason = FinishReason.TOOL_CALLS if calls and self.reason is FinishReason.STOP else self.reason
        return replace(self, reason=reason, reasoning_tokens=reasoning_tokens)


class Stream:
    """Turns one stream's tokens into text; the concatenated text is the same for any split into batches.

    The semantics are those of checking after every token, in this order:

    1. After the first `min_tokens` tokens, a stop id, or an end-of-sequence id unless `ignore_eos`, ends the stream.
       Its own text is left out, except with `include_stop_string`.
    2. A stop string that is complete with a token after the first `min_tokens` ends the stream; it may have begun
       earlier.
    3. A token after the first `max_tokens` is ignored and ends the stream with LENGTH.

    After its end a stream ignores tokens.

    Args:
        options: of the stream; parsers are not its business.
        vocabulary: of the model.
        limits: what options may ask for.
        markers: special tokens whose text stays even where special tokens are left out.

    Raises:
        SluiceError: the options cannot be honoured.

    Attributes:
        recorder: what each token stands for, where the options ask for it.
    """

    __slots__ = (
        "_detokenizer",
        "_ends",
        "_include",
        "_max_tokens",
        "_min_tokens",
        "_scanner",
        "finish",
        "recorder",
        "tokens_seen",
    )

    def __init__(
        self, options: StreamOptions, vocabulary: Vocabulary, limits: Limits, markers: frozenset[str] = NO_MARKERS
    ) -> None:
        stops = compile_stops(options.stop, limits.max_stop_strings, limits.max_stop_chars)
        self._scanner = None if stops is None else StopScanner(stops, options.include_stop_string)
        self._detokenizer: Detokenizer = vocabulary.detokenizer(
            options.skip_special_tokens, options.prompt_tail, markers
        )
        self.recorder = TokenRecorder(self._detokenizer, vocabulary) if options.token_texts else None
        if self.recorder is not None:
            self._detokenizer = self.recorder
        # The caller's stop ids contain the end-of-sequence ids too: ignore_eos takes them out again.
        ends = options.stop_token_ids | options.eos_token_ids
        self._ends = ends - options.eos_token_ids if options.ignore_eos else ends
        self._include = options.include_stop_string
        self._min_tokens = options.min_tokens
        self._max_tokens = options.max_tokens or sys.maxsize
        self.tokens_seen = 0
        self.finish: Finish | None = None

    def close(self) -> None:
        """Nobody wants to hear of it any more."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Text that became certain with these tokens; look at `finish` afterwards."""
        if len(tokens) == 1:
            return self.feed_one(tokens[0])
        feed_one, parts = self.feed_one, []
        for token in tokens:
            if text := feed_one(token):
                parts.append(text)
            if self.finish is not None:
                break
        return "".join(parts)

    def feed_one(self, token: int) -> str:
        """`feed` of one token."""
        if self.finish is not None:
            return ""
        seen = self.tokens_seen + 1
        if seen > self._max_tokens:
            return self._close("", Finish(FinishReason.LENGTH, self._max_tokens))
        self.tokens_seen = seen
        if token in self._ends and seen > self._min_tokens:
            return self._end_at(token)
        try:
            text = self._detokenizer.step(token)
        except SluiceError as error:
            return self._close("", Finish(FinishReason.ERROR, seen, error=error))
        if self._scanner is None or not text:
            return text
        return self._scan(self._scanner, text)

    def _scan(self, scanner: StopScanner, text: str) -> str:
        text = scanner.scan(text, self.tokens_seen > self._min_tokens)
        if scanner.hit:
            self.finish = Finish(FinishReason.STOP, self.tokens_seen, stop_string=scanner.hit)
        return text

    def _end_at(self, token: int) -> str:
        finish = Finish(FinishReason.STOP, self.tokens_seen, stop_token_id=token)
        if not self._include:
            if self.recorder is not None:
                self.recorder.note(token)
            return self._close("", finish)
        try:
            return self._close(self._detokenizer.step(token), finish)
        except SluiceError:
            return self._close("", finish)  # ids that only end streams need not be in the vocabulary

    def end(self, reason: FinishReason, stop_token_id: int | None = None) -> str:
        """The engine has ended the stream: the text that was held back. A stream that is over stays as it is.

        Args:
            reason: the engine's, UNSPECIFIED is read as LENGTH; a stop string that only now turns out to be complete
                makes it STOP.
            stop_token_id: the id that ended it, as the engine said.
        """
        if self.finish is not None:
            return ""
        reason = reason or FinishReason.LENGTH
        return self._close("", Finish(reason, self.tokens_seen, stop_token_id=stop_token_id))

    def _close(self, text: str, finish: Finish) -> str:
        """The last text; a stop string in it came before what `finish` says."""
        text += self._detokenizer.flush()
        if self._scanner is not None:
            text = self._scan(self._scanner, text)
            if self.finish is None:
                text += self._scanner.flush()
        self.finish = self.finish or finish
        return text
