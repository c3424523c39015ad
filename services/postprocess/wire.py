"""Converts between messages and streams; shared with workers that detokenize locally."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from services.common.base.errors import SluiceError, internal
from services.common.base.packing import pack_u32, unpack_u32
from services.common.base.shared_steps import shared_step
from services.common.rpc.errors import to_detail
from services.postprocess.detokenize.stream import Finish, FinishReason, StreamOptions
from services.postprocess.detokenize.token_texts import TokenTexts
from services.postprocess.parsers.events import CallArguments, CallStart, Content, Degraded, Event, Reasoning
from services.postprocess.streams.output_batch import Batch
from services.postprocess.streams.resume import Resume
from sluice.v1 import common_pb2, postprocess_pb2

log = logging.getLogger(__name__)

ToolCallDelta = postprocess_pb2.ToolCallDelta
NOTHING = Content("")
_REASONS = {reason.value: reason for reason in FinishReason}


def to_options(message: postprocess_pb2.StreamOptions) -> StreamOptions:
    """Returns stream options from their message; raises SluiceError for truncated packed ids."""
    return StreamOptions(
        model=message.model,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        stop=tuple(message.stop),
        include_stop_string=message.include_stop_string,
        stop_token_ids=frozenset(unpack_u32(message.stop_token_ids, "stop_token_ids")),
        eos_token_ids=frozenset(unpack_u32(message.eos_token_ids, "eos_token_ids")),
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        prompt_tail=unpack_u32(message.prompt_tail, "prompt_tail"),
        tool_parser=message.tool_parser,
        reasoning_parser=message.reasoning_parser,
        tools_json=message.tools_json,
        tool_choice_json=message.tool_choice_json,
        single_tool_call=message.single_tool_call,
        guided=message.guided,
        token_texts=message.token_texts,
        template_kwargs_json=message.chat_template_kwargs_json,
        max_tokens=message.max_tokens,
        guided_calls=message.guided_calls,
        thinking=message.thinking,
    )


def to_resume(message: postprocess_pb2.StreamResume) -> Resume:
    """Returns the progress of a resumed stream from its message; raises SluiceError for truncated packed ids."""
    return Resume(
        token_ids=unpack_u32(message.token_ids, "resume.token_ids"),
        text_sent=message.text_sent,
        reasoning_sent=message.reasoning_sent,
        calls={call.index: call.arguments_sent for call in message.calls},
        tokens_sent=message.tokens_sent,
    )


def to_response(events: list[Event], finish: Finish) -> postprocess_pb2.ParseResponse:
    """Returns the response with the events and finish of a complete stream."""
    calls: dict[int, ToolCallDelta] = {}
    for event in events:
        if isinstance(event, CallStart):
            calls[event.call] = ToolCallDelta(index=event.call, id=event.id, name=event.name)
    for call, delta in calls.items():
        delta.arguments = "".join(e.text for e in events if isinstance(e, CallArguments) and e.call == call)
    message = to_finish(0, finish)
    message.degraded = ",".join(dict.fromkeys(event.reason for event in events if isinstance(event, Degraded)))
    return postprocess_pb2.ParseResponse(
        text="".join(event.text for event in events if isinstance(event, Content)),
        reasoning="".join(event.text for event in events if isinstance(event, Reasoning)),
        tool_calls=calls.values(),
        finish=message,
    )


def to_reason(number: int) -> FinishReason:
    """Returns a finish reason from its number; LENGTH for none and for an unknown one."""
    return _REASONS.get(number, FinishReason.LENGTH)


def parts(events: list[Event]) -> Iterator[tuple[Event, list[ToolCallDelta]]]:
    """Groups events for messages: adjacent pieces of tool calls become one list of deltas."""
    calls: list[ToolCallDelta] = []
    for event in events:
        if isinstance(event, CallStart):
            delta = ToolCallDelta(index=event.call, id=event.id, name=event.name)
        elif isinstance(event, CallArguments):
            if calls and calls[-1].index == event.call:
                calls[-1].arguments += event.text
                continue
            delta = ToolCallDelta(index=event.call, arguments=event.text)
        else:
            if calls:
                yield NOTHING, calls
                calls = []
            yield event, []
            continue
        calls.append(delta)
    if calls:
        yield NOTHING, calls


def to_event(slot: int, event: Event, calls: list[ToolCallDelta]) -> postprocess_pb2.StreamEvent:
    """Returns the message of a parser's event."""
    return postprocess_pb2.StreamEvent(
        slot=slot,
        text=event.text if isinstance(event, Content) else "",
        reasoning=event.text if isinstance(event, Reasoning) else "",
        degraded=event.reason if isinstance(event, Degraded) else "",
        tool_calls=calls,
    )


def to_tokens(tokens: TokenTexts) -> postprocess_pb2.TokenTexts:
    """Returns the message of token texts."""
    return postprocess_pb2.TokenTexts(
        lengths=pack_u32(tokens.lengths), pieces=bytes(tokens.pieces), text_offsets=pack_u32(tokens.offsets)
    )


def to_finish(slot: int, finish: Finish) -> postprocess_pb2.StreamEvent:
    """Returns the message of a stream's end."""
    return postprocess_pb2.StreamEvent(
        slot=slot,
        finish_reason=common_pb2.FinishReason.ValueType(int(finish.reason)),
        stop_string=finish.stop_string,
        stop_token_id=finish.stop_token_id,
        tokens_seen=finish.tokens_seen,
        reasoning_tokens=finish.reasoning_tokens,
        error=to_detail(finish.error) if finish.error is not None else None,
    )


@shared_step("postprocess.serialize")
def to_text_batch(batch: Batch | None, refuse: Callable[[int, SluiceError], None]) -> postprocess_pb2.TextBatch | None:
    """Returns the message of a batch of output; None for None.

    Args:
        refuse: called with the slot whose output cannot be sent, which is dropped, and the error of its stream.
    """
    if batch is None:
        return None
    try:
        return _text_batch(batch)
    except Exception:  # seldom: find the rows at fault
        return _text_batch(_without_unsendable(batch, refuse))


def _text_batch(batch: Batch) -> postprocess_pb2.TextBatch:
    events: list[postprocess_pb2.StreamEvent] = []
    if batch.tokens:
        events += [_to_token_event(slot, tokens) for slot, tokens in batch.tokens]
    if batch.events:
        events += [to_event(slot, *part) for slot, events in batch.events for part in parts(events)]
    if batch.finishes:
        events += [to_finish(slot, finish) for slot, finish in batch.finishes]
    return postprocess_pb2.TextBatch(
        slots=pack_u32(batch.slots),
        text_lengths=pack_u32(batch.text_lengths),
        text=batch.text,
        events=events,
        draining=batch.draining,
    )


def _to_token_event(slot: int, tokens: TokenTexts) -> postprocess_pb2.StreamEvent:
    return postprocess_pb2.StreamEvent(slot=slot, tokens=to_tokens(tokens))


def _without_unsendable(batch: Batch, refuse: Callable[[int, SluiceError], None]) -> Batch:
    """Returns a batch without all output of the slots of which a part cannot be sent."""
    texts = list(_texts(batch))
    attempts: list[tuple[int, Callable[[], object]]] = [
        *((slot, text.encode) for slot, text in texts),
        *((slot, partial(_to_token_event, slot, tokens)) for slot, tokens in batch.tokens),
        *((slot, partial(_to_events, slot, events)) for slot, events in batch.events),
        *((slot, partial(to_finish, slot, finish)) for slot, finish in batch.finishes),
    ]
    failed: set[int] = set()
    for slot, attempt in attempts:
        try:
            attempt()
        except Exception as error:
            if slot not in failed:
                failed.add(slot)
                log.error("the output of a stream cannot be sent", extra={"slot": slot}, exc_info=error)
                refuse(slot, internal("The output of this stream cannot be sent; see the log of postprocess."))
    texts = [(slot, text) for slot, text in texts if slot not in failed]
    return replace(
        batch,
        slots=array("I", [slot for slot, _ in texts]),
        text_lengths=array("I", [len(text) for _, text in texts]),
        text="".join(text for _, text in texts),
        tokens=[(slot, tokens) for slot, tokens in batch.tokens if slot not in failed],
        events=[(slot, events) for slot, events in batch.events if slot not in failed],
        finishes=[(slot, finish) for slot, finish in batch.finishes if slot not in failed],
    )


def _texts(batch: Batch) -> Iterator[tuple[int, str]]:
    start = 0
    for slot, length in zip(batch.slots, batch.text_lengths, strict=True):
        yield slot, batch.text[start : start + length]
        start += length


def _to_events(slot: int, events: list[Event]) -> list[postprocess_pb2.StreamEvent]:
    return [to_event(slot, *part) for part in parts(events)]
