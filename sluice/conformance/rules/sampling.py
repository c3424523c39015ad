"""Rules about sampling options: claimed ones take effect, others are refused or ignored."""

from __future__ import annotations

from collections.abc import Callable

from services.common.base.packing import pack_u32
from services.worker.contract.capabilities import Capability
from sluice.conformance.exceptions import NotChecked, NotClaimed, RuleFailed
from sluice.conformance.observed_stream import REASONS
from sluice.conformance.refusals import (
    UNSUPPORTED,
    expect_unsupported,
    expect_unsupported_option,
    refusal_message,
)
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import Subject
from sluice.v1 import worker_pb2

ENDS = (REASONS.FINISH_REASON_STOP, REASONS.FINISH_REASON_LENGTH)
Setter = Callable[[worker_pb2.GenerateRequest, list[int]], None]


def _number(name: str, value: float) -> Setter:
    return lambda request, prompt: setattr(request.sampling, name, value)


def _bias(request: worker_pb2.GenerateRequest, prompt: list[int]) -> None:
    request.sampling.logit_bias[prompt[0]] = 5.0


def _allowed(request: worker_pb2.GenerateRequest, prompt: list[int]) -> None:
    request.sampling.allowed_token_ids = pack_u32(prompt)


def _bad_words(request: worker_pb2.GenerateRequest, prompt: list[int]) -> None:
    request.sampling.bad_words.append(pack_u32(prompt[:2]))


OPTIONS: dict[Capability, Setter] = {
    Capability.TEMPERATURE: _number("temperature", 0.7),
    Capability.TOP_P: _number("top_p", 0.5),
    Capability.TOP_K: _number("top_k", 5),
    Capability.MIN_P: _number("min_p", 0.1),
    Capability.FREQUENCY_PENALTY: _number("frequency_penalty", 0.5),
    Capability.PRESENCE_PENALTY: _number("presence_penalty", 0.5),
    Capability.REPETITION_PENALTY: _number("repetition_penalty", 1.2),
    Capability.SEED: _number("seed", 7),
    Capability.LOGIT_BIAS: _bias,
    Capability.ALLOWED_TOKEN_IDS: _allowed,
    Capability.BAD_WORDS: _bad_words,
    Capability.THINKING_TOKEN_BUDGET: _number("thinking_token_budget", 16),
}


@rule("sampling-options", "Every sampling option that the card claims is accepted.", "common.proto, SamplingOptions")
async def sampling_options(subject: Subject) -> str:
    claimed = [option for option in OPTIONS if subject.claims(option)]
    if not claimed:
        raise NotClaimed("The card claims no sampling option.")
    async with subject.session() as caller:
        requests = [_with(subject, option) for option in claimed]
        for option, stream in zip(claimed, await caller.complete(*requests), strict=True):
            expect(stream.reason in ENDS, f"{option} is claimed but a request with it ended with {stream.describe()}.")
    return f"Accepted: {', '.join(claimed)}."


@rule(
    "unclaimed-options",
    "A sampling option that the card does not claim is refused with a message, or ignored.",
    "common.proto, ModelCard.capabilities",
)
async def unclaimed_options(subject: Subject) -> str:
    outcomes = []
    for option in OPTIONS:
        if not subject.claims(option):
            stream = await subject.complete(_with(subject, option))
            try:
                outcomes.append(
                    f"{option} {'ignored' if stream.reason in ENDS else refusal_message(stream, UNSUPPORTED)}"
                )
            except RuleFailed as reason:
                raise RuleFailed(f"{option} is not claimed. {reason}") from None
    return f"{', '.join(outcomes)}." if outcomes else "Every sampling option is claimed."


@rule("engine-options", "Engine-specific options are refused unless claimed.", "SamplingOptions.engine_options_json")
async def engine_options(subject: Subject) -> str:
    request = subject.request()
    if not subject.claims(Capability.ENGINE_OPTIONS):
        request.sampling.engine_options_json = b'{"sluice_conformance": 1}'
        await expect_unsupported(subject, request)
    request.sampling.engine_options_json = b"{}"
    stream = await subject.complete(request)
    expect(stream.reason in ENDS, f"A request with an empty object ended with {stream.describe()}.")
    return "An object without options is accepted."


@rule("allowed-token-ids", "Only allowed ids are generated.", "common.proto, SamplingOptions.allowed_token_ids")
async def allowed_token_ids(subject: Subject) -> str:
    allowed = subject.prompt(5)
    request = subject.full_length()
    request.sampling.allowed_token_ids = pack_u32(allowed)
    if not subject.claims(Capability.ALLOWED_TOKEN_IDS):
        await expect_unsupported_option(subject, request)
    stream = await subject.complete(request)
    expect(stream.reason in ENDS, f"The request ended with {stream.describe()}.")
    outside = set(stream.token_ids) - {*allowed, *subject.eos_token_ids}
    expect(not outside, f"Ids {sorted(outside)[:5]} were generated but are not allowed.")
    return f"{len(stream.token_ids)} tokens, all among the 5 allowed ids."


@rule("logit-bias", "A bias of 100 forces an id, a bias of -100 prevents it.", "SamplingOptions.logit_bias")
async def logit_bias(subject: Subject) -> str:
    forced = subject.prompt(1)[0]
    request = subject.full_length()
    request.sampling.logit_bias[forced] = 100.0
    if not subject.claims(Capability.LOGIT_BIAS):
        await expect_unsupported_option(subject, request)
    stream = await subject.complete(request)
    generated = sorted(set(stream.token_ids))
    expect(generated == [forced], f"Id {forced} has a bias of 100 but ids {generated[:5]} were generated.")
    prompt = subject.prompt()
    plain = await subject.complete(subject.full_length(prompt))
    prevented = plain.token_ids[0]
    request = subject.full_length(prompt)
    request.sampling.logit_bias[prevented] = -100.0
    stream = await subject.complete(request)
    expect(prevented not in stream.token_ids, f"Id {prevented} was generated despite its bias of -100.")
    return f"Only id {forced} with a bias of 100; no id {prevented} with -100."


@rule("bad-words", "A forbidden sequence of ids is not generated.", "common.proto, SamplingOptions.bad_words")
async def bad_words(subject: Subject) -> str:
    prompt = subject.prompt()
    if not subject.claims(Capability.BAD_WORDS):
        await expect_unsupported_option(subject, _with(subject, Capability.BAD_WORDS))
    plain = await subject.complete(subject.full_length(prompt))
    if len(plain.token_ids) < 2:
        raise NotChecked(f"No sequence to forbid: a plain generation ended with {plain.describe()}.")
    word = plain.token_ids[:2]
    request = subject.full_length(prompt)
    request.sampling.bad_words.append(pack_u32(word))
    stream = await subject.complete(request)
    pairs = list(zip(stream.token_ids, stream.token_ids[1:], strict=False))
    expect(tuple(word) not in pairs, f"The ids {word} were generated in sequence although they were forbidden.")
    return f"The ids {word} were generated before they were forbidden but not after."


def _with(subject: Subject, option: Capability) -> worker_pb2.GenerateRequest:
    request = subject.request(greedy=False)
    OPTIONS[option](request, subject.prompt())
    return request
