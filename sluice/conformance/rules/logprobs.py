"""Log-probabilities: one entry a token, in order, and probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.worker.contract.capabilities import Capability
from sluice.conformance.refusals import unclaimed
from sluice.conformance.rule import expect, rule
from sluice.conformance.subject import OUTPUT_TOKENS, Subject, prompt_of
from sluice.v1 import common_pb2

TOP = 3
ROUNDING = 1e-3


@rule(
    "logprobs", "Every generated token comes with its logprob and the likeliest alternatives.", "OutputOptions.logprobs"
)
async def logprobs(subject: Subject) -> str:
    request = subject.endless()
    request.output.logprobs = TOP
    if not subject.claims(Capability.LOGPROBS):
        await unclaimed(subject, request)
    heard = await subject.ask(request)
    positions = heard.logprobs
    expect(len(positions) == len(heard.token_ids), f"{len(positions)} positions for {len(heard.token_ids)} tokens.")
    chosen = [position.chosen.token_id for position in positions]
    expect(chosen == heard.token_ids, "The chosen ids of the positions are not the generated ones.")
    _check_positions(positions)
    return f"{len(positions)} positions of {TOP} alternatives; all are probabilities."


@rule("logprobs-of-chosen", "logprobs of 0 asks for the chosen token alone.", "common.proto, OutputOptions.logprobs")
async def logprobs_of_chosen(subject: Subject) -> str:
    request = subject.endless()
    request.output.logprobs = 0
    if not subject.claims(Capability.LOGPROBS):
        await unclaimed(subject, request)
    heard = await subject.ask(request)
    expect(
        len(heard.logprobs) == len(heard.token_ids),
        f"{len(heard.logprobs)} positions for {len(heard.token_ids)} tokens.",
    )
    with_more = [position for position in heard.logprobs if len(position.top) > 1]
    expect(not with_more, "Alternatives came that nobody asked for.")
    return f"{len(heard.logprobs)} positions without alternatives."


@rule("prompt-logprobs", "The first delta carries logprobs of the prompt's tokens.", "OutputOptions.prompt_logprobs")
async def prompt_logprobs(subject: Subject) -> str:
    request = subject.request(max_tokens=OUTPUT_TOKENS)
    request.output.prompt_logprobs = TOP
    if not subject.claims(Capability.PROMPT_LOGPROBS):
        await unclaimed(subject, request)
    heard = await subject.ask(request)
    carriers = [extra for extra in heard.extras if extra.prompt_logprobs]
    expect(len(carriers) == 1, f"{len(carriers)} deltas carry logprobs of the prompt.")
    expect(carriers[0].HasField("cached_tokens"), "They did not come on the first delta.")
    positions, prompt = list(carriers[0].prompt_logprobs), prompt_of(request)
    # Nothing comes before the first token, so it may be left out or have no logprob.
    first = len(prompt) - len(positions)
    expect(first in (0, 1), f"{len(positions)} positions for {len(prompt)} prompt tokens.")
    told = positions if first else positions[1:]
    ids = [position.chosen.token_id for position in told]
    expect(ids == prompt[1:], "The ids of the positions are not those of the prompt.")
    _check_positions(told)
    return f"{len(positions)} positions for {len(prompt)} prompt tokens."


def _check_positions(positions: Sequence[common_pb2.PositionLogprobs]) -> None:
    for number, position in enumerate(positions, 1):
        values = [token.logprob for token in (position.chosen, *position.top)]
        expect(all(map(math.isfinite, values)), f"Position {number} has a logprob that is no number.")
        expect(all(value <= ROUNDING for value in values), f"Position {number} has a logprob above 0.")
        top = [token.logprob for token in position.top]
        expect(top == sorted(top, reverse=True), f"The alternatives of position {number} are not the likeliest first.")
        expect(len(top) >= TOP, f"Position {number} has {len(top)} alternatives of {TOP}.")
        ids = {token.token_id for token in position.top}
        expect(len(ids) == len(top), f"Position {number} names an id twice.")
        total = math.fsum(map(math.exp, top))
        expect(total <= 1 + ROUNDING, f"The probabilities of position {number} add up to {total:.3f}.")
        ranks = [token.rank for token in position.top if token.rank]
        expect(ranks == sorted(ranks), f"The ranks of position {number} are not ascending.")
