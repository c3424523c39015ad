"""Rules about a single generation, from its first delta to its last."""

from __future__ import annotations

from services.common.base.errors import ErrorKind
from sluice.conformance.exceptions import NotClaimed
from sluice.conformance.observed_stream import ObservedStream
from sluice.conformance.refusals import expect_call_refused
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import OUTPUT_TOKENS, Subject, prompt_of
from sluice.v1 import worker_pb2


@rule(
    "one-terminal",
    "Every request ends with exactly one terminal delta, and no message follows it.",
    "worker.proto, TokenExtra.finish_reason",
)
async def one_terminal(subject: Subject) -> str:
    async with subject.session() as caller:
        wrong = subject.request()
        wrong.model = subject.unknown_model
        streams = await caller.complete(subject.request(max_tokens=1), subject.request(), wrong)
        # Surplus messages arrive before the end of a request that starts only now.
        streams.append(await caller.complete_one(subject.request()))
        for one in streams:
            expect(len(one.terminals) == 1, f"A request had {len(one.terminals)} terminal deltas.")
            expect(one.after_terminal == 0, f"{one.after_terminal} messages followed a terminal delta.")
    return "One terminal delta for requests that ended by length, by a stop and by a refusal; no message after it."


@rule(
    "batch-form",
    "The columns of a TokenBatch are consistent and contain only slots that were started.",
    "worker.proto, TokenBatch",
)
async def batch_form(subject: Subject) -> str:
    async with subject.session() as caller:
        await caller.complete(*(subject.request() for _ in range(4)))
        expect(not caller.violations, " ".join(caller.violations[:3]))
        return f"{caller.batches} messages for 4 requests, all well formed."


@rule(
    "first-delta",
    "The first delta, and no other, reports how many prompt tokens were cached.",
    "worker.proto, TokenExtra.cached_tokens",
)
async def first_delta(subject: Subject) -> str:
    stream = await subject.complete(subject.full_length(max_tokens=2 * OUTPUT_TOKENS))
    expect(bool(stream.cached), "cached_tokens was not reported.")
    expect(len(stream.cached) == 1, f"cached_tokens was reported {len(stream.cached)} times.")
    tokens, late = stream.cached[0]
    expect(not late, "cached_tokens was reported after the first tokens.")
    return f"{tokens} cached tokens, reported once, with the first of {len(stream.token_ids)} tokens."


@rule("vocabulary", "Every generated id is within the vocabulary.", "common.proto, ModelCard.vocab_size")
async def vocabulary(subject: Subject) -> str:
    size = subject.card.vocab_size
    if not size:
        raise NotClaimed("The card has no vocab_size.")
    async with subject.session() as caller:
        streams = await caller.complete(*(subject.request(greedy=False, max_tokens=32) for _ in range(4)))
    ids = [token_id for one in streams for token_id in one.token_ids]
    outside = [token_id for token_id in ids if token_id >= size]
    expect(not outside, f"Ids {outside[:5]} are outside the vocabulary; ids are below {size}.")
    return f"{len(ids)} ids, all below {size}."


@rule(
    "usage",
    "The terminal delta has exact counts of prompt, generated and cached tokens, also for a failed request.",
    "common.proto, Usage; worker.proto, TokenExtra.usage",
)
async def usage(subject: Subject) -> str:
    async with subject.session() as caller:
        ended = await caller.complete(subject.request(), subject.request(subject.prompt(7), max_tokens=3))
        for stream in ended:
            _check_usage(stream)
        wrong = subject.request()
        wrong.model = subject.unknown_model
        refused = await caller.complete_one(wrong)
        expect(refused.terminal.HasField("usage"), "The terminal delta of a refused request has no usage.")
    counted = ended[0].terminal.usage
    return f"{counted.prompt_tokens} prompt and {counted.completion_tokens} generated tokens counted."


def _check_usage(stream: ObservedStream) -> None:
    expect(stream.terminal.HasField("usage"), f"The terminal delta has no usage ({stream.describe()}).")
    counted, prompt = stream.terminal.usage, len(prompt_of(stream.request))
    expect(counted.prompt_tokens == prompt, f"usage has {counted.prompt_tokens} prompt tokens, {prompt} were sent.")
    received = len(stream.token_ids)
    expect(
        counted.completion_tokens == received,
        f"usage has {counted.completion_tokens} generated tokens, {received} were received.",
    )
    expect(counted.cached_tokens <= prompt, f"usage has {counted.cached_tokens} cached of {prompt} prompt tokens.")


@rule(
    "typed-status",
    "Generate refuses requests with a gRPC status and a typed detail.",
    "common.proto, ErrorDetail: trailing metadata sluice-error-bin",
)
async def typed_status(subject: Subject) -> str:
    wrong = subject.request()
    wrong.model = subject.unknown_model
    return f"Refused: {await expect_call_refused(subject, _generate(subject, wrong), ErrorKind.NOT_FOUND)}"


async def _generate(subject: Subject, request: worker_pb2.GenerateRequest) -> None:
    async for _ in subject.stub.Generate(request, timeout=subject.patience.generation_s):
        pass
