"""A stage of the gateway that records the token ids of every prompt, and what was cached of them.

`flags` of a suite make its gateway append to the file that SLUICE_TEST_PROMPTS names; `turns_of` reads it.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from sluice.stages import Components, GenerationRequest, TokenizedPrompt, WorkerEntry, unpack_u32
from sluice.v1 import router_pb2, router_pb2_grpc

RECORDED_WITHIN_S = 20
VARIABLE = "SLUICE_TEST_PROMPTS"
FLAGS = ("--stage", f"tokenize={__name__}:RecordedPrompts")


class RecordedPrompts:
    """Stage `tokenize`: as the built-in one, and writes the ids down."""

    def __init__(self, components: Components) -> None:
        self._preprocess = components.preprocess
        self._file = Path(os.environ[VARIABLE])

    async def tokenize(self, request: GenerationRequest, worker: WorkerEntry) -> TokenizedPrompt:
        prompt = await self._preprocess.tokenize(
            request.model, request.prompt, worker.block_size, request.lora, request.cache_salt
        )
        with self._file.open("a") as file:
            file.write(json.dumps([request.request_id, unpack_u32(prompt.token_ids).tolist()]) + "\n")
        return prompt


@dataclass(frozen=True)
class Turn:
    """A prompt of a session.

    Attributes:
        tokens: its length.
        ideal: tokens, in whole blocks, that it has in common with the start of an earlier prompt.
        cached: tokens that the worker had in its cache.
    """

    tokens: int
    ideal: int
    cached: int


@dataclass(frozen=True)
class Share:
    """What was cached of the turns of a session that continue an earlier one."""

    shape: str
    agent: str
    turns: Sequence[Turn]

    @property
    def of_ideal(self) -> float:
        """The least of the turns' shares of what could be cached; text that the worker generated may be cached, too."""
        return min((min(turn.cached / turn.ideal, 1.0) for turn in self.turns if turn.ideal), default=1.0)


def prompts_in(file: Path) -> dict[str, list[int]]:
    """Token ids by request id, oldest first."""
    return dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {}


def turns_of(prompts: Mapping[str, Sequence[int]], router: str, block: int) -> list[Turn]:
    """The turns of a session in their order.

    Args:
        prompts: of the session, by request id.
        router: host:port of the router whose decision records say what was cached.
        block: size of the workers' blocks.
    """
    cached: dict[str, int] = {}
    deadline = time.monotonic() + RECORDED_WITHIN_S
    while not prompts.keys() <= cached.keys():  # a request is freed soon after its answer
        assert time.monotonic() < deadline, f"no decision records of {prompts.keys() - cached.keys()}"
        time.sleep(0.1)
        cached = _delivered(router)
    turns: list[Turn] = []
    for number, (request_id, prompt) in enumerate(prompts.items()):
        earlier = itertools.islice(prompts.values(), number)
        common = max((_common(prompt, other) for other in earlier), default=0)
        # An engine computes the last token of a prompt at least.
        turns.append(Turn(len(prompt), min(common, len(prompt) - 1) // block * block, cached[request_id]))
    return turns


def _delivered(router: str) -> dict[str, int]:
    with grpc.insecure_channel(router) as channel:
        response = router_pb2_grpc.RouterStub(channel).GetDecisions(router_pb2.GetDecisionsRequest(), timeout=30)
    return {
        decision.request_id.removesuffix("-0"): decision.delivered_cached_tokens  # the number of the choice
        for decision in response.decisions
        if decision.HasField("delivered_cached_tokens")
    }


def _common(one: Iterable[int], other: Iterable[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
