"""Rules about the end of a generation: maximum length, stop ids and end-of-sequence ids."""

from __future__ import annotations

from services.common.base.packing import pack_u32
from services.worker.contract.capabilities import Capability
from sluice.conformance.exceptions import NotChecked
from sluice.conformance.observed_stream import REASONS, ObservedStream
from sluice.conformance.refusals import expect_unsupported_option
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import Subject, prompt_of

STOP, LENGTH = REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH
SAMPLE_TOKENS = 24


@rule(
    "max-tokens",
    "A generation without a stop has exactly max_tokens tokens and the finish reason LENGTH.",
    "common.proto, StopOptions.max_tokens",
)
async def max_tokens(subject: Subject) -> str:
    lengths = (1, 2, 17, 40)
    async with subject.session() as caller:
        stream = await caller.complete(*(subject.full_length(max_tokens=length) for length in lengths))
    for length, one in zip(lengths, stream, strict=True):
        natural = one.reason == STOP and len(one.token_ids) <= length and not subject.supports_full_length
        exact = one.reason == LENGTH and len(one.token_ids) == length
        expect(exact or natural, f"With max_tokens {length}, the request ended with {one.describe()}.")
    return f"{', '.join(map(str, lengths))} tokens requested and received."


@rule(
    "stop-ids",
    "A generation ends right after the first stop id, which is its last token.",
    "StopOptions.stop_token_ids",
)
async def stop_ids(subject: Subject) -> str:
    stream, stop_id = await _stopped(subject)
    at = stream.token_ids.index(stop_id)
    expect(at == len(stream.token_ids) - 1, f"{len(stream.token_ids) - 1 - at} tokens followed the stop id.")
    expect(stream.reason == STOP, f"The request ended with {stream.describe()}, not with STOP.")
    return f"Ended with id {stop_id} as token {at + 1}."


@rule("stop-id-reported", "The terminal delta reports the id that ended the generation.", "TokenExtra.stop_token_id")
async def stop_id_reported(subject: Subject) -> str:
    stream, stop_id = await _stopped(subject)
    reported = stream.terminal.stop_token_id if stream.terminal.HasField("stop_token_id") else None
    expect(reported == stop_id, f"stop_token_id is {reported}, the generation ended with {stop_id}.")
    return f"stop_token_id is {reported}."


@rule(
    "eos",
    "An end-of-sequence id ends the generation with STOP and is reported and counted.",
    "StopOptions.eos_token_ids; Usage.completion_tokens",
)
async def eos(subject: Subject) -> str:
    sample = await _sample(subject)
    for eos_id in _candidates(sample):
        request = subject.request(_prompt(sample), max_tokens=SAMPLE_TOKENS, stops=(eos_id,))
        request.stop.eos_token_ids = pack_u32((eos_id,))
        stream = await subject.complete(request)
        if eos_id in stream.token_ids:
            break
    else:
        raise NotChecked("No id of a sample was generated again; the output is not reproducible.")
    expect(stream.token_ids[-1] == eos_id, "Tokens followed the end-of-sequence id.")
    expect(stream.reason == STOP, f"The request ended with {stream.describe()}, not with STOP.")
    reported = stream.terminal.stop_token_id if stream.terminal.HasField("stop_token_id") else None
    expect(reported == eos_id, f"stop_token_id is {reported}, the sequence ended with {eos_id}.")
    counted = stream.terminal.usage.completion_tokens
    expect(counted == len(stream.token_ids), f"usage has {counted} tokens, {len(stream.token_ids)} were received.")
    return f"Ended with id {eos_id} as token {counted}, counted and reported."


@rule("ignore-eos", "With ignore_eos, end-of-sequence ids do not end a generation.", "StopOptions.ignore_eos")
async def ignore_eos(subject: Subject) -> str:
    if not subject.claims(Capability.IGNORE_EOS):
        request = subject.request()
        request.stop.ignore_eos = True
        await expect_unsupported_option(subject, request)
    sample = await _sample(subject)
    eos_id = _candidates(sample)[0]
    request = subject.request(_prompt(sample), max_tokens=SAMPLE_TOKENS, stops=(eos_id,))
    request.stop.eos_token_ids = pack_u32((eos_id,))
    request.stop.ignore_eos = True
    stream = await subject.complete(request)
    expect(
        stream.reason == LENGTH and len(stream.token_ids) == SAMPLE_TOKENS,
        f"The request ended with {stream.describe()} instead of LENGTH after {SAMPLE_TOKENS}.",
    )
    return f"All {SAMPLE_TOKENS} tokens were generated."


@rule("min-tokens", "End-of-sequence and stop ids have no effect before min_tokens tokens.", "StopOptions.min_tokens")
async def min_tokens(subject: Subject) -> str:
    if not subject.claims(Capability.MIN_TOKENS):
        request = subject.request()
        request.stop.min_tokens = 4
        await expect_unsupported_option(subject, request)
    sample = await _sample(subject)
    least = len(sample.token_ids) // 2 + 1
    request = subject.request(_prompt(sample), max_tokens=2 * SAMPLE_TOKENS, stops=_candidates(sample))
    request.stop.min_tokens = least
    stream = await subject.complete(request)
    expect(stream.reason in (STOP, LENGTH), f"The request ended with {stream.describe()}.")
    expect(len(stream.token_ids) >= least, f"The request ended with {stream.describe()}; min_tokens is {least}.")
    return f"{len(stream.token_ids)} tokens with a min_tokens of {least}."


async def _stopped(subject: Subject) -> tuple[ObservedStream, int]:
    """Returns a generation that contains a stop id taken from an earlier sample, and the id."""
    sample = await _sample(subject)
    for stop_id in _candidates(sample):
        stream = await subject.complete(subject.request(_prompt(sample), max_tokens=SAMPLE_TOKENS, stops=(stop_id,)))
        if stop_id in stream.token_ids:
            return stream, stop_id
    raise NotChecked("No id of a sample was generated again; the output is not reproducible.")


async def _sample(subject: Subject) -> ObservedStream:
    """Returns a generation without stop ids."""
    stream = await subject.complete(subject.full_length(max_tokens=SAMPLE_TOKENS))
    expect(bool(stream.token_ids), f"A plain generation ended with {stream.describe()}.")
    return stream


def _candidates(sample: ObservedStream) -> list[int]:
    """Returns ids to stop at, starting with one from the middle, which allows tokens on both sides."""
    ids = sample.token_ids[:-1] or sample.token_ids
    middle = len(ids) // 2
    return list(dict.fromkeys((ids[middle], ids[-1], ids[0])))


def _prompt(sample: ObservedStream) -> list[int]:
    return prompt_of(sample.request)
