"""Rules about log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.worker.contract.capabilities import Capability
from sluice.conformance.refusals import expect_unsupported
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import OUTPUT_TOKENS, Subject, prompt_of
from sluice.v1 import common_pb2

TOP = 3
ROUNDING = 1e-3


@rule(
    "logprobs",
    "Every generated token has its logprob and those of the most likely alternatives.",
    "OutputOptions.logprobs",
)
async def logprobs(subject: Subject) -> str:
    request = subject.full_length()
    request.output.logprobs = TOP
    if not subject.claims(Capability.LOGPROBS):
        await expect_unsupported(subject, request)
    stream = await subject.complete(request)
    positions = stream.logprobs
    expect(len(positions) == len(stream.token_ids), f"{len(positions)} positions for {len(stream.token_ids)} tokens.")
    chosen = [position.chosen.token_id for position in positions]
    expect(chosen == stream.token_ids, "The chosen ids of the positions are not the generated ids.")
    _check_positions(positions)
    return f"{len(positions)} positions of {TOP} valid alternatives."


@rule("logprobs-of-chosen", "logprobs of 0 returns only the chosen token.", "common.proto, OutputOptions.logprobs")
async def logprobs_of_chosen(subject: Subject) -> str:
    request = subject.full_length()
    request.output.logprobs = 0
    if not subject.claims(Capability.LOGPROBS):
        await expect_unsupported(subject, request)
    stream = await subject.complete(request)
    expect(
        len(stream.logprobs) == len(stream.token_ids),
        f"{len(stream.logprobs)} positions for {len(stream.token_ids)} tokens.",
    )
    with_more = [position for position in stream.logprobs if len(position.top) > 1]
    expect(not with_more, "Alternatives were returned that were not requested.")
    return f"{len(stream.logprobs)} positions without alternatives."


@rule("prompt-logprobs", "The first delta has the logprobs of the prompt tokens.", "OutputOptions.prompt_logprobs")
async def prompt_logprobs(subject: Subject) -> str:
    request = subject.request(max_tokens=OUTPUT_TOKENS)
    request.output.prompt_logprobs = TOP
    if not subject.claims(Capability.PROMPT_LOGPROBS):
        await expect_unsupported(subject, request)
    stream = await subject.complete(request)
    carriers = [extra for extra in stream.extras if extra.prompt_logprobs]
    expect(len(carriers) == 1, f"{len(carriers)} deltas have logprobs of the prompt.")
    expect(carriers[0].HasField("cached_tokens"), "The logprobs of the prompt are not in the first delta.")
    positions, prompt = list(carriers[0].prompt_logprobs), prompt_of(request)
    # The first token has no predecessor, so it may be omitted or have no logprob.
    omitted = len(prompt) - len(positions)
    expect(omitted in (0, 1), f"{len(positions)} positions for {len(prompt)} prompt tokens.")
    conditional = positions if omitted else positions[1:]
    ids = [position.chosen.token_id for position in conditional]
    expect(ids == prompt[1:], "The ids of the positions are not those of the prompt.")
    _check_positions(conditional)
    return f"{len(positions)} positions for {len(prompt)} prompt tokens."


def _check_positions(positions: Sequence[common_pb2.PositionLogprobs]) -> None:
    for number, position in enumerate(positions, 1):
        values = [token.logprob for token in (position.chosen, *position.top)]
        expect(all(map(math.isfinite, values)), f"Position {number} has a logprob that is not finite.")
        expect(all(value <= ROUNDING for value in values), f"Position {number} has a logprob above 0.")
        top = [token.logprob for token in position.top]
        expect(top == sorted(top, reverse=True), f"The alternatives of position {number} are not in descending order.")
        expect(len(top) >= TOP, f"Position {number} has {len(top)} alternatives of {TOP}.")
        ids = {token.token_id for token in position.top}
        expect(len(ids) == len(top), f"Position {number} has an id twice.")
        total = math.fsum(map(math.exp, top))
        expect(total <= 1 + ROUNDING, f"The probabilities of position {number} sum to {total:.3f}.")
        ranks = [token.rank for token in position.top if token.rank]
        expect(ranks == sorted(ranks), f"The ranks of position {number} are not ascending.")
