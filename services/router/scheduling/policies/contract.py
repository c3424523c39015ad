"""The contract of policy stages: what a filter, a scorer and a picker receive and return.

A policy passes the candidates of a request through its filters, scores those that remain, and has its picker order
them. The store then reserves the first one in that order that accepts requests. `sluice.policies` publishes this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, TypeVar

NO_TEXTS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """A request to route.

    Attributes:
        model: served name.
        part: "standalone", or "prefill" or "decode" for one part of a pair.
        prompt_tokens: length of the prompt.
        prompt_blocks: the same in KV blocks, including a partial one.
        output_blocks: KV blocks of the expected output; 0: unknown.
        lora: name of the adapter; empty: none.
        priority: lower is served first; 0 is normal.
        session_id: empty: no session.
        headers: headers of the client's request that the caller of the router passed on, names in lower case.
    """

    model: str
    part: str = "standalone"
    prompt_tokens: int = 0
    prompt_blocks: int = 0
    output_blocks: int = 0
    lora: str = ""
    priority: int = 0
    session_id: str = ""
    headers: Mapping[str, str] = field(default_factory=lambda: NO_TEXTS)


class PolicyTarget(Protocol):
    """A data-parallel rank of a worker, which is what every candidate is."""

    @property
    def worker_id(self) -> str: ...

    @property
    def rank(self) -> int: ...


T = TypeVar("T", bound=PolicyTarget)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A data-parallel rank that may run the request, as this replica knew it when the request arrived.

    Attributes:
        address: host:port of the worker.
        role: "aggregated", "prefill" or "decode".
        capabilities: of the engine, from the worker's model card.
        adapters: LoRA adapters loaded now.
        labels: names and values that the worker's operator gave it (`--worker-labels`).
        total_blocks: KV blocks of the rank.
        cached_blocks: KV blocks that the rank holds for any prompt.
        device_blocks, host_blocks, disk_blocks: leading blocks of the prompt that the rank holds, by tier.
        predicted_blocks: further ones that it has not reported but is expected to hold.
        prefill_blocks: blocks reserved on the rank and not computed yet.
        decode_blocks: blocks reserved for its requests.
        requests: requests reserved.
        cost: cost of policy `kv` in blocks; the lowest is best.
        in_session: whether the previous request of the session ran here.
    """

    worker_id: str
    rank: int
    address: str = ""
    role: str = "aggregated"
    capabilities: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    total_blocks: int = 0
    cached_blocks: int = 0
    device_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    predicted_blocks: int = 0
    prefill_blocks: float = 0.0
    decode_blocks: float = 0.0
    requests: int = 0
    cost: float = 0.0
    in_session: bool = False
    labels: Mapping[str, str] = field(default_factory=lambda: NO_TEXTS)

    @property
    def overlap_blocks(self) -> int:
        """Leading blocks of the prompt that the rank holds on any tier or is expected to hold."""
        return self.device_blocks + self.host_blocks + self.disk_blocks + self.predicted_blocks


class Filter(ABC):
    """Removes candidates that must not run a request.

    The keyword parameters of the constructor are those of the policy file; a ValueError rejects their values.
    """

    @abstractmethod
    def keep(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Returns the candidates that may run the request; none: the request fails."""


class Scorer(ABC):
    """Scores candidates. Parameters as for Filter; the policy file gives each scorer a weight."""

    @abstractmethod
    def score(self, request: PolicyRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """Returns a score from 0 to 1 for each candidate, in the same order; the highest is best."""


class Picker(ABC):
    """Orders candidates by their scores. Parameters as for Filter."""

    @abstractmethod
    def pick(self, request: PolicyRequest, candidates: Sequence[T], scores: Sequence[float]) -> Sequence[Sequence[T]]:
        """Returns candidates in groups, the most preferred group first.

        The store reserves the cheapest candidate of the first group that has one below its busy thresholds. Candidates
        that are in no group are tried last, by load.

        Args:
            candidates: at least one.
            scores: the weighted mean of the scorers for each candidate; all 0 without scorers.
        """
