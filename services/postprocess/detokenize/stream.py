"""Streams that convert token ids to text and apply stop conditions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.base.errors import SluiceError
from services.common.types.generation import FinishReason as FinishReason
from services.postprocess.detokenize.detokenizer import Detokenizer
from services.postprocess.detokenize.stops import StopScanner, compile_stops
from services.postprocess.detokenize.token_texts import TokenRecorder
from services.postprocess.detokenize.vocabulary import Vocabulary

NO_MARKERS: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of a stream; see `sluice.v1.StreamOptions`."""

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
    guided_calls: bool = False
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one stream.

    Attributes:
        max_stop_strings: stop strings.
        max_stop_chars: code points of all stop strings together.
        max_tools_bytes: bytes of the tool definitions.
    """

    max_stop_strings: int = 1_000
    max_stop_chars: int = 8_192
    max_tools_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Finish:
    """End of a stream; at most one of stop_string, stop_token_id and error is set."""

    reason: FinishReason
    tokens_seen: int
    stop_string: str = ""
    stop_token_id: int | None = None
    error: SluiceError | None = None
    reasoning_tokens: int = 0

    def parsed(self, calls: bool, reasoning_tokens: int) -> Finish:
        """Returns the finish of a parsed stream: STOP becomes TOOL_CALLS if there were calls."""
        reason = FinishReason.TOOL_CALLS if calls and self.reason is FinishReason.STOP else self.reason
        return Finish(reason, self.tokens_seen, self.stop_string, self.stop_token_id, self.error, reasoning_tokens)


class Stream:
    """Converts one stream's tokens to text, which does not depend on how the tokens are batched.

    The following conditions are checked after every token, in this order:

    1. After the first `min_tokens` tokens, a stop id, or an end-of-sequence id unless `ignore_eos`, ends the stream.
       Its text is omitted, except with `include_stop_string`.
    2. A stop string that is completed by a token after the first `min_tokens` ends the stream; it may begin earlier.
    3. A token after the first `max_tokens` is ignored and ends the stream with LENGTH.

    A stream ignores tokens after its end.

    Args:
        options: of the stream; parser options are ignored.
        vocabulary: of the model.
        limits: bounds of the options.
        markers: special tokens whose text is kept even if special tokens are skipped.

    Raises:
        SluiceError: the options are invalid.

    Attributes:
        recorder: records token texts, if the options request them.
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
        # stop_token_ids include the end-of-sequence ids, which ignore_eos removes.
        ends = options.stop_token_ids | options.eos_token_ids
        self._ends = ends - options.eos_token_ids if options.ignore_eos else ends
        self._include = options.include_stop_string
        self._min_tokens = options.min_tokens
        self._max_tokens = options.max_tokens or sys.maxsize
        self.tokens_seen = 0
        self.finish: Finish | None = None

    def close(self) -> None:
        """Does nothing; for the interface of RemoteStream."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Returns the text completed by these tokens; check `finish` afterwards."""
        if len(tokens) == 1:
            return self.feed_one(tokens[0])
        if (text := self.peek(tokens)) is not None:
            self.tokens_seen += len(tokens)
            return text
        feed_one, parts = self.feed_one, []
        for token in tokens:
            if text := feed_one(token):
                parts.append(text)
            if self.finish is not None:
                break
        return "".join(parts)

    def peek(self, tokens: Sequence[int]) -> str | None:
        """Returns the text of tokens, found at once, if `feed` would only count them; None if that is uncertain."""
        if self._scanner is not None or self.finish is not None or not self._ends.isdisjoint(tokens):
            return None
        if self.tokens_seen + len(tokens) > self._max_tokens:
            return None
        return self._detokenizer.peek(tokens)

    def feed_one(self, token: int) -> str:
        """Returns the text completed by one token; see `feed`."""
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
            return self._close("", finish)  # ids that only end streams may be outside the vocabulary

    def end(self, reason: FinishReason, stop_token_id: int | None = None) -> str:
        """Ends the stream as the engine did; returns the text held back. Does nothing after the end.

        Args:
            reason: of the engine. A stop string in the text held back makes it STOP.
            stop_token_id: the id that ended the stream, as reported by the engine.
        """
        if self.finish is not None:
            return ""
        return self._close("", Finish(reason, self.tokens_seen, stop_token_id=stop_token_id))

    def _close(self, text: str, finish: Finish) -> str:
        """Ends the stream; a stop string in its last text takes precedence over `finish`."""
        text += self._detokenizer.flush()
        if self._scanner is not None:
            text = self._scan(self._scanner, text)
            if self.finish is None:
                text += self._scanner.flush()
        self.finish = self.finish or finish
        return text
