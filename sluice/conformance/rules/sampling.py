"""How the next token is chosen: what is claimed is honoured, what is not is refused."""

from __future__ import annotations

from collections.abc import Callable

from services.common.packing import pack_u32
from services.worker.contract.capabilities import Capability
from sluice.conformance.heard import REASONS
from sluice.conformance.refusals import UNSUPPORTED, refusal_of, unclaimed, unclaimed_option
from sluice.conformance.rule import Broken, NotChecked, NotClaimed, expect, rule
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
        for option, heard in zip(claimed, await caller.ask(*requests), strict=True):
            expect(heard.reason in ENDS, f"{option} is claimed, and a request with it ended with {heard.describe()}.")
    return f"Accepted: {', '.join(claimed)}."


@rule(
    "unclaimed-options",
    "A sampling option that the card does not claim is refused in words, or taken and does no harm.",
    "common.proto, ModelCard.capabilities",
)
async def unclaimed_options(subject: Subject) -> str:
    told = []
    for option in OPTIONS:
        if not subject.claims(option):
            heard = await subject.ask(_with(subject, option))
            try:
                told.append(f"{option} {'taken' if heard.reason in ENDS else refusal_of(heard, UNSUPPORTED)}")
            except Broken as reason:
                raise Broken(f"{option} is not claimed. {reason}") from None
    return f"{', '.join(told)}." if told else "Every sampling option is claimed."


@rule(
    "engine-options", "Options of the engine's own are refused unless claimed.", "SamplingOptions.engine_options_json"
)
async def engine_options(subject: Subject) -> str:
    request = subject.request()
    if not subject.claims(Capability.ENGINE_OPTIONS):
        request.sampling.engine_options_json = b'{"sluice_conformance": 1}'
        await unclaimed(subject, request)
    request.sampling.engine_options_json = b"{}"
    heard = await subject.ask(request)
    expect(heard.reason in ENDS, f"With no option in it, the request ended with {heard.describe()}.")
    return "An object without options is taken."


@rule("allowed-token-ids", "Only the allowed ids come out.", "common.proto, SamplingOptions.allowed_token_ids")
async def allowed_token_ids(subject: Subject) -> str:
    allowed = subject.prompt(5)
    request = subject.endless()
    request.sampling.allowed_token_ids = pack_u32(allowed)
    if not subject.claims(Capability.ALLOWED_TOKEN_IDS):
        await unclaimed_option(subject, request)
    heard = await subject.ask(request)
    expect(heard.reason in ENDS, f"It ended with {heard.describe()}.")
    outside = set(heard.token_ids) - {*allowed, *subject.eos_token_ids}
    expect(not outside, f"Ids {sorted(outside)[:5]} came, which were not allowed.")
    return f"{len(heard.token_ids)} tokens, all of the 5 allowed ids."


@rule("logit-bias", "A bias of 100 makes an id win, one of -100 keeps it away.", "SamplingOptions.logit_bias")
async def logit_bias(subject: Subject) -> str:
    favoured = subject.prompt(1)[0]
    pushed = subject.endless()
    pushed.sampling.logit_bias[favoured] = 100.0
    if not subject.claims(Capability.LOGIT_BIAS):
        await unclaimed_option(subject, pushed)
    heard = await subject.ask(pushed)
    expect(set(heard.token_ids) == {favoured}, f"Id {favoured} was favoured; {sorted(set(heard.token_ids))[:5]} came.")
    prompt = subject.prompt()
    plain = await subject.ask(subject.endless(prompt))
    shunned = plain.token_ids[0]
    pulled = subject.endless(prompt)
    pulled.sampling.logit_bias[shunned] = -100.0
    heard = await subject.ask(pulled)
    expect(shunned not in heard.token_ids, f"Id {shunned} came in spite of its bias of -100.")
    return f"Only id {favoured} with 100; no id {shunned} with -100."


@rule("bad-words", "A forbidden sequence of ids does not come out.", "common.proto, SamplingOptions.bad_words")
async def bad_words(subject: Subject) -> str:
    prompt = subject.prompt()
    if not subject.claims(Capability.BAD_WORDS):
        await unclaimed_option(subject, _with(subject, Capability.BAD_WORDS))
    plain = await subject.ask(subject.endless(prompt))
    if len(plain.token_ids) < 2:
        raise NotChecked(f"There is no sequence to forbid: the engine ended with {plain.describe()}.")
    word = plain.token_ids[:2]
    request = subject.endless(prompt)
    request.sampling.bad_words.append(pack_u32(word))
    heard = await subject.ask(request)
    pairs = list(zip(heard.token_ids, heard.token_ids[1:], strict=False))
    expect(tuple(word) not in pairs, f"The ids {word} came one after the other although they were forbidden.")
    return f"The ids {word} came before they were forbidden and not after."


def _with(subject: Subject, option: Capability) -> worker_pb2.GenerateRequest:
    request = subject.request(greedy=False)
    OPTIONS[option](request, subject.prompt())
    return request
