"""Detokenizes and parses the output of all requests in one batch per engine step."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from services.common.base.errors import internal, invalid
from services.common.base.shared_steps import shared_step
from services.postprocess.detokenize.stream import Finish
from services.postprocess.streams.session import PostSession
from services.worker.contract.generation import FinishReason, GenerateRequest, PositionLogprobs
from services.worker.contract.text_delta import TextUpdate, by_slot
from services.worker.generation.response_sink import ResponseSink, SinkParams
from services.worker.local_processing.pending_parses import PendingParses
from services.worker.local_processing.text_sink import TextSink
from services.worker.local_processing.token_batch import StepTokens

log = logging.getLogger(__name__)

MAX_SLOTS = 1 << 32
"""Numbers of slots, which then start again at the lowest."""
NO_TRACE: Mapping[str, str] = {}


class BatchDetokenizer:
    """Produces the text of one worker's requests.

    Tokens accumulate during an engine step and are converted in the next iteration of the event loop. This does not
    depend on how fast callers read, so a stop string ends its request in the following step.

    Args:
        session: creates a postprocess session from a callback that is called when output is available.
        model: served name under which the session has the model.
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
        self._pending = PendingParses(lambda slot: self._session.behind(slot))
        self._due: asyncio.Handle | None = None

    def __len__(self) -> int:
        """Number of requests whose text has not ended."""
        return len(self._sinks)

    def open(
        self, request: GenerateRequest, target: ResponseSink, params: SinkParams, stop: Callable[[], None]
    ) -> TextSink:
        """Starts the text of a request; the text of resumed tokens is not delivered again.

        Args:
            target: receives the text, and the tokens up to the end of the text.
            params: limits that the engine is held to.
            stop: aborts the request in the engine.

        Raises:
            SluiceError: INVALID_ARGUMENT with the invalid option.
        """
        options = request.text_out
        assert options is not None
        if options.model not in ("", self._model, request.model, request.lora):
            raise invalid(
                f"postprocess.model is {options.model!r} but the request's model is {request.model!r}; omit it.",
                param="postprocess.model",
            )
        self._last_slot = slot = (self._last_slot + 1) % MAX_SLOTS
        sink = TextSink(slot, target, stop, request.resumed_tokens, self._put, self._end)
        sink.accept(target.context, len(request.token_ids), _engine_params(params, target), None)
        self._process_step()
        self._sinks[slot], self._slots[request.request_id] = sink, slot
        self._session.open(slot, request.request_id, replace(options, model=self._model), NO_TRACE)
        if resumed := sink.resumed_tokens:
            self._session.feed(array("I", [slot]), array("I", [resumed]), request.token_ids[-resumed:])
        self._deliver_initial(request.request_id, sink)
        return sink

    def _deliver_initial(self, request_id: str, sink: TextSink) -> None:
        """Delivers what the session produced before the first new token."""
        text = by_slot(self._session.drain()).get(sink.slot)
        if self._session.lags(sink.slot):
            self._pending.add(sink.slot, bool(sink.resumed_tokens))
        if text is None:
            return
        if text.finish is not None and text.finish.error is not None:
            self.forget(request_id)
            raise text.finish.error
        if not sink.resumed_tokens:
            sink.target.deliver_text(text)
        elif text.finish is not None:
            self._early.append((sink, text.finish))
            self._wake()

    def forget(self, request_id: str) -> None:
        """Drops the text of a request; unknown ids are ignored."""
        slot = self._slots.pop(request_id, None)
        if slot is not None and self._sinks.pop(slot, None) is not None:
            self._pending.forget(slot)
            self._session.close([slot])

    async def close(self) -> None:
        """Drops all requests and closes the session."""
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
            self._due = asyncio.get_running_loop().call_soon(self._process_step)

    @shared_step("worker.texts")
    def _process_step(self) -> None:
        """Detokenizes everything accumulated so far and delivers tokens and text."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        step, ended, early = self._step, self._ended, self._early
        self._step, self._ended, self._early = StepTokens(), [], []
        try:
            if self._pending:
                step = self._pending.due(step)
                self._ended, ended = _partition(ended, self._pending.is_busy)
                self._deliver_parsed()
            texts = self._detokenize(step, ended)
        except Exception:
            log.exception("detokenization of a step failed")
            self._fail_all()
            return
        for sink, finish in early:
            texts.setdefault(sink.slot, TextUpdate()).finish = finish
        if self._pending:
            unparsed, step = step.partition(self._pending.is_busy)
            self._pending.add_tokens(unparsed)
        self._deliver_tokens(step, texts)
        self._deliver_texts(texts)

    def _deliver_texts(self, texts: Mapping[int, TextUpdate]) -> None:
        for slot, text in texts.items():
            if (sink := self._sinks.get(slot)) is None:
                continue
            try:
                sink.target.deliver_text(text)
                if text.finish is not None:
                    self._finish(sink, text.finish)
            except Exception:
                log.exception("delivery of text failed", extra={"request": sink.context.request_id})
                self._fail([sink])

    def _deliver_parsed(self) -> None:
        """Delivers what parsers in other processes have returned, with the tokens it was parsed from."""
        for slot, text in by_slot(self._session.drain()).items():
            self._pending.add_text(slot, text)
        for slot, tokens, text in self._pending.take_completed():
            self._deliver_tokens(tokens, {slot: text})
            self._deliver_texts({slot: text})

    def _detokenize(self, step: StepTokens, ended: Iterable[TextSink]) -> dict[int, TextUpdate]:
        if step.rows:
            self._session.feed(array("I", [sink.slot for sink, _ in step.rows]), step.counts, step.token_ids)
        for sink in ended:
            terminal = sink.terminal
            if sink.slot in self._sinks and terminal is not None and terminal.finish_reason is not None:
                try:
                    self._session.end(sink.slot, terminal.finish_reason, terminal.stop_token_id)
                except Exception:
                    log.exception("the end of a text failed", extra={"request": sink.context.request_id})
                    self._fail([sink])
        return by_slot(self._session.drain())

    def _deliver_tokens(self, step: StepTokens, texts: Mapping[int, TextUpdate]) -> None:
        """Delivers tokens up to the end of their text."""
        end, token_ids = 0, step.token_ids
        for (sink, logprobs), count in zip(step.rows, step.counts, strict=True):
            start, end = end, end + count
            if sink.slot not in self._sinks:
                continue
            text = texts.get(sink.slot)
            if text is not None and text.finish is not None:
                count = min(count, max(text.finish.tokens_seen - sink.resumed_tokens - sink.target.delivered, 0))
            if count:
                sink.target.push(token_ids[start : start + count], logprobs[:count])

    def _finish(self, sink: TextSink, finish: Finish) -> None:
        """Ends a request whose text has ended, and aborts it in the engine if it is still running there."""
        self._slots.pop(sink.context.request_id, None)
        self._sinks.pop(sink.slot, None)
        self._pending.forget(sink.slot)
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
        session, self._session = self._session, self._make_session(self._wake)
        session.close([sink.slot for sink in sinks])
        self._fail(sinks)

    def _fail(self, sinks: Iterable[TextSink]) -> None:
        error = internal("The worker failed to detokenize the output; see its log.")
        for sink in sinks:
            self._session.close([sink.slot])
            self._finish(sink, Finish(FinishReason.ERROR, 0, error=error))


def _engine_params(params: SinkParams, target: ResponseSink) -> SinkParams:
    """Returns the parameters of a sink between the engine and `target`, which reports the end of the request itself."""
    return SinkParams(
        lambda sink, reason, usage: None,
        lambda sink, rule: params.on_violation(target, rule),
        vocab_size=params.vocab_size,
        strict=params.strict,
    )


def _partition(sinks: Iterable[TextSink], matches: Callable[[int], bool]) -> tuple[list[TextSink], list[TextSink]]:
    """Returns the sinks whose slot matches, and the others."""
    groups: tuple[list[TextSink], list[TextSink]] = [], []
    for sink in sinks:
        groups[not matches(sink.slot)].append(sink)
    return groups


def _ends_before(finish: Finish, reason: FinishReason) -> bool:
    """Whether the text ended at a stop condition that the engine did not detect."""
    return bool(finish.stop_string) or (finish.stop_token_id is not None and reason is not FinishReason.STOP)
