"""One request inside the mock engine's scheduler."""

from __future__ import annotations

from array import array
from enum import Enum, auto

from services.common.hashing import block_hashes
from services.worker.contract.engine import Sink
from services.worker.contract.generation import GenerateRequest, Usage
from services.worker.engines.mock.text import Answer


class State(Enum):
    """Where a sequence is."""

    WAITING = auto()
    PREFILLING = auto()
    DECODING = auto()
    ENDED = auto()


class Sequence:
    """A request with its blocks and its progress.

    Attributes:
        order: smaller is served first and preempted last.
        tokens: prompt and the whole answer to come; the answer is known beforehand, only its time is not.
        known: tokens that exist by now: the prompt, and what was generated.
        computed: tokens whose keys and values are in the cache; kept up while prefilling, known - 1 while decoding.
        quiet: decoding steps to come that neither need a block, fill one, nor end the sequence.
        hashes: chained hashes of its full blocks, as far as they were needed.
        cached_tokens: prompt tokens reused when it was first scheduled.
        handed: tokens of the answer that a prefill worker gave already: 0 or 1.
        arrived: its cache came from a prefill worker and waits to be placed.
    """

    __slots__ = (
        "answer",
        "arrived",
        "blocks",
        "cached_tokens",
        "computed",
        "end",
        "handed",
        "hashes",
        "known",
        "limit",
        "order",
        "prompt_tokens",
        "quiet",
        "request",
        "scheduled_at",
        "sink",
        "state",
        "tokens",
    )

    def __init__(self, request: GenerateRequest, limit: int, arrival: int, sink: Sink | None = None) -> None:
        self.request = request
        self.limit = limit
        self.sink = sink
        self.order = (request.priority, arrival)
        self.state = State.WAITING
        self.prompt_tokens = len(request.token_ids)
        self.known = self.prompt_tokens
        self.computed = 0
        self.quiet = 0
        self.blocks: list[int] = []
        self.hashes = array("Q")
        self.tokens = array("I")
        self.end = 0
        self.answer: Answer | None = None
        self.cached_tokens = 0
        self.scheduled_at: float | None = None
        self.handed = 0
        self.arrived = False

    def __lt__(self, other: Sequence) -> bool:
        return self.order < other.order

    def prepare(self, answer: Answer) -> None:
        """Takes the answer, right before it is first scheduled."""
        self.answer = answer
        self.tokens = self.request.token_ids + answer.token_ids
        self.end = len(self.tokens)

    def hand_over(self, answer: Answer) -> None:
        """The prompt and the answer's first token were computed elsewhere."""
        self.prepare(answer)
        self.handed = 1
        self.arrived = True
        self.known = self.prompt_tokens + 1

    @property
    def first_known(self) -> int:
        """What `known` is when the first token of this engine is out."""
        return self.prompt_tokens + self.handed + 1

    def hash_upto(self, blocks: int, block_size: int) -> array[int]:
        """Hashes of at least the first `blocks` full blocks."""
        have = len(self.hashes)
        if have < blocks:
            request = self.request
            self.hashes += block_hashes(
                self.tokens[have * block_size : blocks * block_size],
                block_size,
                request.lora,
                request.cache_salt,
                parent=self.hashes[-1] if have else None,
            )
        return self.hashes

    def usage(self, undelivered: int = 0) -> Usage:
        """Token counts so far, without the last `undelivered` ones."""
        generated = self.known - self.prompt_tokens - self.handed - undelivered
        return Usage(self.prompt_tokens, generated, self.cached_tokens)
