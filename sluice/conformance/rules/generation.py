"""One generation, from its first delta to its last."""

from __future__ import annotations

from services.common.errors import ErrorKind
from sluice.conformance.heard import ObservedStream
from sluice.conformance.refusals import call_refused
from sluice.conformance.rule import NotClaimed, expect, rule
from sluice.conformance.subject import OUTPUT_TOKENS, Subject, prompt_of
from sluice.v1 import worker_pb2


@rule(
    "one-terminal",
    "Every request ends in exactly one terminal delta, and nothing follows it.",
    "worker.proto, TokenExtra.finish_reason",
)
async def one_terminal(subject: Subject) -> str:
    async with subject.session() as caller:
        wrong = subject.request()
        wrong.model = f"{subject.card.model}-which-nobody-serves"
        heard = await caller.ask(subject.request(max_tokens=1), subject.request(), wrong)
        # What a worker says too much arrives before the end of a request that starts only now.
        heard.append(await caller.ask_one(subject.request()))
        for one in heard:
            expect(len(one.terminals) == 1, f"A request ended {len(one.terminals)} times.")
            expect(one.after_terminal == 0, f"{one.after_terminal} messages came after a terminal delta.")
    return "Ended by length, by itself and by refusal, once each, and silent after it."


@rule(
    "batch-form",
    "The columns of a TokenBatch fit together and speak only of slots that were started.",
    "worker.proto, TokenBatch",
)
async def batch_form(subject: Subject) -> str:
    async with subject.session() as caller:
        await caller.ask(*(subject.request() for _ in range(4)))
        expect(not caller.violations, " ".join(caller.violations[:3]))
        return f"{caller.batches} messages for 4 requests, all well formed."


@rule(
    "first-delta",
    "The first delta, and no other, says how many prompt tokens were cached.",
    "worker.proto, TokenExtra.cached_tokens",
)
async def first_delta(subject: Subject) -> str:
    heard = await subject.ask(subject.endless(max_tokens=2 * OUTPUT_TOKENS))
    expect(bool(heard.cached), "cached_tokens never came.")
    expect(len(heard.cached) == 1, f"cached_tokens came {len(heard.cached)} times.")
    tokens, late = heard.cached[0]
    expect(not late, "cached_tokens came after the first tokens.")
    return f"{tokens} cached tokens, said once, with the first of {len(heard.token_ids)} tokens."


@rule("vocabulary", "Every generated id is inside the vocabulary.", "common.proto, ModelCard.vocab_size")
async def vocabulary(subject: Subject) -> str:
    size = subject.card.vocab_size
    if not size:
        raise NotClaimed("The card does not say how large the vocabulary is.")
    async with subject.session() as caller:
        heard = await caller.ask(*(subject.request(greedy=False, max_tokens=32) for _ in range(4)))
    ids = [token_id for one in heard for token_id in one.token_ids]
    outside = [token_id for token_id in ids if token_id >= size]
    expect(not outside, f"Ids {outside[:5]} came; ids are below {size}.")
    return f"{len(ids)} ids, all below {size}."


@rule(
    "usage",
    "The terminal delta counts prompt, generated and cached tokens exactly, also of a request that failed.",
    "common.proto, Usage; worker.proto, TokenExtra.usage",
)
async def usage(subject: Subject) -> str:
    async with subject.session() as caller:
        ended = await caller.ask(subject.request(), subject.request(subject.prompt(7), max_tokens=3))
        for heard in ended:
            _check_usage(heard)
        wrong = subject.request()
        wrong.model = f"{subject.card.model}-which-nobody-serves"
        refused = await caller.ask_one(wrong)
        expect(refused.terminal.HasField("usage"), "The terminal delta of a refused request has no usage.")
    counted = ended[0].terminal.usage
    return f"{counted.prompt_tokens} prompt and {counted.completion_tokens} generated tokens, as sent and received."


def _check_usage(heard: ObservedStream) -> None:
    expect(heard.terminal.HasField("usage"), f"The terminal delta has no usage ({heard.describe()}).")
    counted, prompt = heard.terminal.usage, len(prompt_of(heard.request))
    expect(counted.prompt_tokens == prompt, f"usage says {counted.prompt_tokens} prompt tokens of {prompt}.")
    received = len(heard.token_ids)
    expect(
        counted.completion_tokens == received,
        f"usage says {counted.completion_tokens} generated tokens, {received} came.",
    )
    expect(counted.cached_tokens <= prompt, f"usage says {counted.cached_tokens} cached of {prompt} prompt tokens.")


@rule(
    "typed-status",
    "Generate refuses with a gRPC status and a typed detail.",
    "common.proto, ErrorDetail: trailing metadata sluice-error-bin",
)
async def typed_status(subject: Subject) -> str:
    wrong = subject.request()
    wrong.model = f"{subject.card.model}-which-nobody-serves"
    return f"Refused: {await call_refused(subject, _drained(subject, wrong), ErrorKind.NOT_FOUND)}"


async def _drained(subject: Subject, request: worker_pb2.GenerateRequest) -> None:
    async for _ in subject.stub.Generate(request, timeout=subject.patience.generation_s):
        pass
