"""The same request gives the same answer."""

from __future__ import annotations

from services.worker.contract.capabilities import Capability
from sluice.conformance.refusals import unclaimed_option
from sluice.conformance.rule import NotClaimed, expect, rule
from sluice.conformance.subject import Subject
from sluice.v1 import worker_pb2

TOKENS = 24


@rule("greedy", "At temperature 0 the same prompt gives the same ids.", "common.proto, SamplingOptions.temperature")
async def greedy(subject: Subject) -> str:
    if not subject.claims(Capability.TEMPERATURE):
        request = subject.request()
        request.sampling.temperature = 0.5
        await unclaimed_option(subject, request)
    prompt = subject.prompt()
    first = await subject.ask(subject.endless(prompt, TOKENS))
    second = await subject.ask(subject.endless(prompt, TOKENS))
    expect(first.token_ids == second.token_ids, _difference(first.token_ids, second.token_ids))
    return f"{len(first.token_ids)} ids, twice the same."


@rule("seed", "With the same seed the same prompt gives the same ids at a high temperature.", "SamplingOptions.seed")
async def seed(subject: Subject) -> str:
    if not subject.claims(Capability.SEED):
        request = subject.request(greedy=False)
        request.sampling.seed = 7
        await unclaimed_option(subject, request)
    prompt = subject.prompt()

    def seeded() -> worker_pb2.GenerateRequest:
        request = subject.endless(prompt, TOKENS)
        if subject.claims(Capability.TEMPERATURE):
            request.sampling.temperature = 1.0
        request.sampling.seed = 7
        return request

    first, second = await subject.ask(seeded()), await subject.ask(seeded())
    expect(first.token_ids == second.token_ids, _difference(first.token_ids, second.token_ids))
    return f"{len(first.token_ids)} ids, twice the same."


@rule(
    "session-equals-generate",
    "Generate gives what Session gives: ids, finish reason and usage.",
    "worker.proto, Generate: the twin of Session",
)
async def session_equals_generate(subject: Subject) -> str:
    if not subject.claims(Capability.TEMPERATURE) and not subject.claims(Capability.SEED):
        raise NotClaimed("Neither temperature nor seed is claimed, so two answers need not be equal.")
    prompt = subject.prompt()
    requests = [subject.endless(prompt, TOKENS) for _ in range(2)]
    if not subject.claims(Capability.TEMPERATURE):
        for request in requests:
            request.sampling.seed = 7
    one, other = await subject.ask(requests[0]), await subject.generate(requests[1])
    expect(len(other.terminals) == 1, f"The stream of Generate had {len(other.terminals)} terminal deltas.")
    expect(other.after_terminal == 0, "The stream of Generate went on after its terminal delta.")
    expect(one.token_ids == other.token_ids, _difference(one.token_ids, other.token_ids))
    expect(one.reason == other.reason, f"Session ended with {one.describe()}, Generate with {other.describe()}.")
    counts = [(heard.terminal.usage.prompt_tokens, heard.terminal.usage.completion_tokens) for heard in (one, other)]
    expect(counts[0] == counts[1], f"Session counts {counts[0]} prompt and generated tokens, Generate {counts[1]}.")
    return f"{len(one.token_ids)} ids, the same on both ways."


def _difference(left: list[int], right: list[int]) -> str:
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return f"Token {position + 1} is {one} the first time and {other} the second time."
    return f"{len(left)} tokens came the first time and {len(right)} the second time."
