"""Rules about reproducibility: equal requests have equal output."""

from __future__ import annotations

from services.worker.contract.capabilities import Capability
from sluice.conformance.exceptions import NotClaimed
from sluice.conformance.refusals import expect_unsupported_option
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import Subject
from sluice.v1 import worker_pb2

TOKENS = 24


@rule("greedy", "At temperature 0, equal prompts produce equal ids.", "common.proto, SamplingOptions.temperature")
async def greedy(subject: Subject) -> str:
    if not subject.claims(Capability.TEMPERATURE):
        request = subject.request()
        request.sampling.temperature = 0.5
        await expect_unsupported_option(subject, request)
    prompt = subject.prompt()
    first = await subject.complete(subject.full_length(prompt, TOKENS))
    second = await subject.complete(subject.full_length(prompt, TOKENS))
    expect(first.token_ids == second.token_ids, _difference(first.token_ids, second.token_ids))
    return f"{len(first.token_ids)} ids, twice the same."


@rule("seed", "With the same seed, equal prompts produce equal ids at temperature 1.", "SamplingOptions.seed")
async def seed(subject: Subject) -> str:
    if not subject.claims(Capability.SEED):
        request = subject.request(greedy=False)
        request.sampling.seed = 7
        await expect_unsupported_option(subject, request)
    prompt = subject.prompt()

    def seeded() -> worker_pb2.GenerateRequest:
        request = subject.full_length(prompt, TOKENS)
        if subject.claims(Capability.TEMPERATURE):
            request.sampling.temperature = 1.0
        request.sampling.seed = 7
        return request

    first, second = await subject.complete(seeded()), await subject.complete(seeded())
    expect(first.token_ids == second.token_ids, _difference(first.token_ids, second.token_ids))
    return f"{len(first.token_ids)} ids, twice the same."


@rule(
    "session-equals-generate",
    "Generate returns the same ids, finish reason and usage as Session.",
    "worker.proto, Generate: equivalent to Session",
)
async def session_equals_generate(subject: Subject) -> str:
    if not subject.claims(Capability.TEMPERATURE) and not subject.claims(Capability.SEED):
        raise NotClaimed("Neither temperature nor seed is claimed, so the output need not be reproducible.")
    prompt = subject.prompt()
    requests = [subject.full_length(prompt, TOKENS) for _ in range(2)]
    if not subject.claims(Capability.TEMPERATURE):
        for request in requests:
            request.sampling.seed = 7
    one, other = await subject.complete(requests[0]), await subject.generate(requests[1])
    expect(len(other.terminals) == 1, f"The stream of Generate had {len(other.terminals)} terminal deltas.")
    expect(other.after_terminal == 0, "The stream of Generate continued after its terminal delta.")
    expect(one.token_ids == other.token_ids, _difference(one.token_ids, other.token_ids))
    expect(one.reason == other.reason, f"Session ended with {one.describe()}, Generate with {other.describe()}.")
    counts = [(stream.terminal.usage.prompt_tokens, stream.terminal.usage.completion_tokens) for stream in (one, other)]
    expect(counts[0] == counts[1], f"Session has {counts[0]} prompt and generated tokens, Generate {counts[1]}.")
    return f"{len(one.token_ids)} equal ids from both RPCs."


def _difference(left: list[int], right: list[int]) -> str:
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return f"Token {position + 1} is {one} in the first and {other} in the second generation."
    return f"The first generation has {len(left)} tokens, the second {len(right)}."
