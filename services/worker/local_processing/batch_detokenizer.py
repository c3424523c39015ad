"""Makes the text of all requests that ask for it, once per engine step and for all of them together."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from services.common.errors import internal, invalid
from services.postprocess.detokenize.stream import Finish
from services.postprocess.detokenize.stream import FinishReason as TextReason
from services.postprocess.streams.session import PostSession
from services.worker.contract.generation import FinishReason, GenerateRequest, PositionLogprobs
from services.worker.generation.response_sink import ResponseSink, SinkParams
from services.worker.generation.text_delta import TextDelta, by_slot
from services.worker.local_processing.pending_parses import PendingParses
from services.worker.local_processing.text_sink import TextSink
from services.worker.local_processing.token_batch import StepTokens

log = logging.getLogger(__name__)

MOST_SLOTS = 1 << 32
NO_TRACE: Mapping[str, str] = {}


class BatchDetokenizer:
    """The texts of one worker.

    Tokens collect while an engine steps and are turned into text in the event loop's next round. None of it waits for
    callers who read slowly, so a stop string ends its request in the step after it.

    Args:
        session: makes a session of the postprocess code, given what to call when it has something to say.
        model: served name, under which the session knows it.
    """

    def __init__(self, session: Callable[[Callable[[], None]], PostSession], model: str) -> None:
        self._make_session = session
        self._model = model
        self._session = session(self._wake)
        self._sinks: dict[int, TextSink] = {}
        self._slots: dict[str, int] = {}
        self._last_slot = 0
        self._step = StepTokens()
        self._ended: list[TextSink] = []
        self._early: list[tuple[TextSink, Finish]] = []
        self._lagging = PendingParses(lambda slot: self._session.behind(slot))
        self._due: asyncio.Handle | None = None

    def __len__(self) -> int:
        """Texts that have not ended."""
        return len(self._sinks)

    def open(
        self, request: GenerateRequest, target: ResponseSink, terms: SinkParams, stop: Callable[[], None]
    ) -> TextSink:
        """Begins a request's text; where it goes on from resumed tokens, their own text is not said again.

        Args:
            target: hears the tokens, up to where the text ends, and the text beside them.
            terms: what the engine is held to.
            stop: ends the request in the engine.

        Raises:
            SluiceError: INVALID_ARGUMENT naming what is wrong with the options.
        """
        options = request.text_out
        assert options is not None
        if options.model not in ("", self._model, request.model, request.lora):
            raise invalid(
                f"The text is asked for model {options.model!r}, the tokens for {request.model!r}; leave it out.",
                param="postprocess.model",
            )
        self._last_slot = slot = (self._last_slot + 1) % MOST_SLOTS
        sink = TextSink(slot, target, stop, request.resumed_tokens, self._put, self._end)
        sink.accept(target.context, len(request.token_ids), _passed_on(terms, target), None)
        self._settle()
        self._sinks[slot], self._slots[request.request_id] = sink, slot
        self._session.open(slot, request.request_id, replace(options, model=self._model), NO_TRACE)
        if sink.before:
            self._session.feed(array("I", [slot]), array("I", [sink.before]), request.token_ids[-sink.before :])
        self._opened(request.request_id, sink)
        return sink

    def _opened(self, request_id: str, sink: TextSink) -> None:
        """What the session says before the first token."""
        text = by_slot(self._session.drain()).get(sink.slot)
        if self._session.lags(sink.slot):
            self._lagging.add(sink.slot, bool(sink.before))
        if text is None:
            return
        if text.finish is not None and text.finish.error is not None:
            self.forget(request_id)
            raise text.finish.error
        if not sink.before:
            sink.target.deliver_text(text)
        elif text.finish is not None:
            self._early.append((sink, text.finish))
            self._wake()

    def forget(self, request_id: str) -> None:
        """Nobody waits for this text any more; unknown ones are ignored."""
        slot = self._slots.pop(request_id, None)
        if slot is not None and self._sinks.pop(slot, None) is not None:
            self._lagging.forget(slot)
            self._session.close([slot])

    async def close(self) -> None:
        """Forgets everything."""
        if self._due is not None:
            self._due.cancel()
        self._sinks.clear()
        self._slots.clear()
        await self._session.aclose()

    def _put(self, sink: TextSink, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> None:
        self._step.add(sink, token_ids, logprobs)
        if self._due is None:
            self._wake()

    def _end(self, sink: TextSink) -> None:
        self._ended.append(sink)
        self._wake()

    def _wake(self) -> None:
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        """Turns everything that has collected into text and passes both on."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        step, ended, early = self._step, self._ended, self._early
        self._step, self._ended, self._early = StepTokens(), [], []
        try:
            if self._lagging:
                step = self._lagging.due(step)
                self._ended, ended = _parted(ended, self._lagging.busy)
                self._pass_answers()
            said = self._said(step, ended)
        except Exception:
            log.exception("the text of a step could not be made")
            self._fail_all()
            return
        for sink, finish in early:
            said.setdefault(sink.slot, TextDelta()).finish = finish
        if self._lagging:
            given, step = step.parted(self._lagging.busy)
            self._lagging.given(given)
        self._pass_tokens(step, said)
        self._pass_texts(said)

    def _pass_texts(self, said: Mapping[int, TextDelta]) -> None:
        for slot, text in said.items():
            if (found := self._sinks.get(slot)) is not None:
                found.target.deliver_text(text)
                if text.finish is not None:
                    self._finish(found, text.finish)

    def _pass_answers(self) -> None:
        """What parsers in other processes have answered, with the tokens it is about."""
        for slot, text in by_slot(self._session.drain()).items():
            self._lagging.hear(slot, text)
        for slot, tokens, text in self._lagging.answered():
            self._pass_tokens(tokens, {slot: text})
            self._pass_texts({slot: text})

    def _said(self, step: StepTokens, ended: Iterable[TextSink]) -> dict[int, TextDelta]:
        if step.rows:
            self._session.feed(array("I", [sink.slot for sink, _ in step.rows]), step.counts, step.token_ids)
        for sink in ended:
            terminal = sink.terminal
            if sink.slot in self._sinks and terminal is not None and terminal.finish_reason is not None:
                self._session.end(sink.slot, TextReason(terminal.finish_reason), terminal.stop_token_id)
        return by_slot(self._session.drain())

    def _pass_tokens(self, step: StepTokens, said: Mapping[int, TextDelta]) -> None:
        """The tokens go on, but none after the end of their text."""
        end, token_ids = 0, step.token_ids
        for (sink, logprobs), count in zip(step.rows, step.counts, strict=True):
            start, end = end, end + count
            if sink.slot not in self._sinks:
                continue
            text = said.get(sink.slot)
            if text is not None and text.finish is not None:
                count = min(count, max(text.finish.tokens_seen - sink.before - sink.target.delivered, 0))
            if count:
                sink.target.push(token_ids[start : start + count], logprobs[:count])

    def _finish(self, sink: TextSink, finish: Finish) -> None:
        """Ends a request whose text has ended, and the engine's part of it if that still runs."""
        self._slots.pop(sink.context.request_id, None)
        self._sinks.pop(sink.slot, None)
        self._lagging.forget(sink.slot)
        target, terminal, usage = sink.target, sink.terminal, sink.usage()
        if finish.error is not None:
            target.finish(FinishReason.ERROR, usage, error=finish.error)
        elif terminal is None or terminal.finish_reason is None or _ends_before(finish, terminal.finish_reason):
            target.finish(FinishReason.STOP, usage, stop_token_id=finish.stop_token_id)
        else:
            target.finish(
                terminal.finish_reason,
                usage,
                stop_token_id=terminal.stop_token_id,
                error=terminal.error,
                handoff=terminal.handoff,
            )
        if terminal is None:
            sink.stop()

    def _fail_all(self) -> None:
        sinks = tuple(self._sinks.values())
        self._session.close(list(self._sinks))
        self._session = self._make_session(self._wake)
        for sink in sinks:
            self._finish(sink, Finish(TextReason.ERROR, 0, error=internal("The text could not be made.")))


def _passed_on(terms: SinkParams, target: ResponseSink) -> SinkParams:
    """What the engine is held to, for a sink before the delivery of which the worker hears everything else."""
    return SinkParams(
        lambda sink, reason, usage: None,
        lambda sink, rule: terms.on_broken(target, rule),
        vocab_size=terms.vocab_size,
        strict=terms.strict,
    )


def _parted(sinks: Iterable[TextSink], apart: Callable[[int], bool]) -> tuple[list[TextSink], list[TextSink]]:
    found: tuple[list[TextSink], list[TextSink]] = [], []
    for sink in sinks:
        found[not apart(sink.slot)].append(sink)
    return found


def _ends_before(finish: Finish, reason: FinishReason) -> bool:
    """The text found an end that the engine did not see."""
    return bool(finish.stop_string) or (finish.stop_token_id is not None and reason is not FinishReason.STOP)
