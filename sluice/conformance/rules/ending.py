"""When a generation ends: lengths, stop ids, the end of sequence."""

from __future__ import annotations

from services.common.packing import pack_u32
from services.worker.contract.capabilities import Capability
from sluice.conformance.heard import REASONS, ObservedStream
from sluice.conformance.refusals import unclaimed_option
from sluice.conformance.rule import NotChecked, expect, rule
from sluice.conformance.subject import Subject, prompt_of

STOP, LENGTH = REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH
SAMPLE_TOKENS = 24


@rule(
    "max-tokens",
    "A generation that nothing else ends has exactly max_tokens tokens and the finish reason LENGTH.",
    "common.proto, StopOptions.max_tokens",
)
async def max_tokens(subject: Subject) -> str:
    lengths = (1, 2, 17, 40)
    async with subject.session() as caller:
        heard = await caller.ask(*(subject.endless(max_tokens=length) for length in lengths))
    for length, one in zip(lengths, heard, strict=True):
        natural = one.reason == STOP and len(one.token_ids) <= length and not subject.lasts
        exact = one.reason == LENGTH and len(one.token_ids) == length
        expect(exact or natural, f"With max_tokens {length} it ended with {one.describe()}.")
    return f"{', '.join(map(str, lengths))} tokens asked for and received."


@rule(
    "stop-ids",
    "A generation ends right after the first stop id, which is its last token.",
    "StopOptions.stop_token_ids",
)
async def stop_ids(subject: Subject) -> str:
    heard, stop_id = await _stopped(subject)
    at = heard.token_ids.index(stop_id)
    expect(at == len(heard.token_ids) - 1, f"{len(heard.token_ids) - 1 - at} tokens came after the stop id.")
    expect(heard.reason == STOP, f"It ended with {heard.describe()}, not with STOP.")
    return f"Ended with id {stop_id} as token {at + 1}."


@rule("stop-id-reported", "The terminal delta names the id that ended the generation.", "TokenExtra.stop_token_id")
async def stop_id_reported(subject: Subject) -> str:
    heard, stop_id = await _stopped(subject)
    said = heard.terminal.stop_token_id if heard.terminal.HasField("stop_token_id") else None
    expect(said == stop_id, f"stop_token_id is {said}, the generation ended with {stop_id}.")
    return f"stop_token_id is {said}."


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
        heard = await subject.ask(request)
        if eos_id in heard.token_ids:
            break
    else:
        raise NotChecked("No id of the sample came out a second time: the engine repeats nothing.")
    expect(heard.token_ids[-1] == eos_id, "Tokens came after the end of the sequence.")
    expect(heard.reason == STOP, f"It ended with {heard.describe()}, not with STOP.")
    said = heard.terminal.stop_token_id if heard.terminal.HasField("stop_token_id") else None
    expect(said == eos_id, f"stop_token_id is {said}, the sequence ended with {eos_id}.")
    counted = heard.terminal.usage.completion_tokens
    expect(counted == len(heard.token_ids), f"usage counts {counted} tokens of {len(heard.token_ids)}.")
    return f"Ended with id {eos_id} as token {counted}, counted and reported."


@rule("ignore-eos", "With ignore_eos the end-of-sequence ids end nothing.", "StopOptions.ignore_eos")
async def ignore_eos(subject: Subject) -> str:
    if not subject.claims(Capability.IGNORE_EOS):
        request = subject.request()
        request.stop.ignore_eos = True
        await unclaimed_option(subject, request)
    sample = await _sample(subject)
    eos_id = _candidates(sample)[0]
    request = subject.request(_prompt(sample), max_tokens=SAMPLE_TOKENS, stops=(eos_id,))
    request.stop.eos_token_ids = pack_u32((eos_id,))
    request.stop.ignore_eos = True
    heard = await subject.ask(request)
    expect(
        heard.reason == LENGTH and len(heard.token_ids) == SAMPLE_TOKENS,
        f"It ended with {heard.describe()} instead of LENGTH after {SAMPLE_TOKENS}.",
    )
    return f"All {SAMPLE_TOKENS} tokens came, whatever their ids."


@rule("min-tokens", "No end-of-sequence and no stop id counts before min_tokens tokens.", "StopOptions.min_tokens")
async def min_tokens(subject: Subject) -> str:
    if not subject.claims(Capability.MIN_TOKENS):
        request = subject.request()
        request.stop.min_tokens = 4
        await unclaimed_option(subject, request)
    sample = await _sample(subject)
    least = len(sample.token_ids) // 2 + 1
    request = subject.request(_prompt(sample), max_tokens=2 * SAMPLE_TOKENS, stops=_candidates(sample))
    request.stop.min_tokens = least
    heard = await subject.ask(request)
    expect(heard.reason in (STOP, LENGTH), f"It ended with {heard.describe()}.")
    expect(len(heard.token_ids) >= least, f"It ended with {heard.describe()}; min_tokens is {least}.")
    return f"{len(heard.token_ids)} tokens with a min_tokens of {least}."


async def _stopped(subject: Subject) -> tuple[ObservedStream, int]:
    """A generation with a stop id that came out of it before, and the id."""
    sample = await _sample(subject)
    for stop_id in _candidates(sample):
        heard = await subject.ask(subject.request(_prompt(sample), max_tokens=SAMPLE_TOKENS, stops=(stop_id,)))
        if stop_id in heard.token_ids:
            return heard, stop_id
    raise NotChecked("No id of the sample came out a second time: the engine repeats nothing.")


async def _sample(subject: Subject) -> ObservedStream:
    """What the engine says when left alone."""
    heard = await subject.ask(subject.endless(max_tokens=SAMPLE_TOKENS))
    expect(bool(heard.token_ids), f"A plain generation ended with {heard.describe()}.")
    return heard


def _candidates(sample: ObservedStream) -> list[int]:
    """Ids to end with, those from the middle first: an end in the middle shows more than one at either side."""
    ids = sample.token_ids[:-1] or sample.token_ids
    middle = len(ids) // 2
    return list(dict.fromkeys((ids[middle], ids[-1], ids[0])))


def _prompt(sample: ObservedStream) -> list[int]:
    return prompt_of(sample.request)
