"""What each tier costs, as measured by `benchmarks/costs.py`, and what a load therefore needs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sluice.cli.errors import BadFlag

FILE = Path(__file__).with_name("costs.json")
TIERS = ("gateway", "preprocess", "router", "postprocess", "redis")
"""Tiers that are sized; the CPU time of a worker beside its engine is measured as well, and is not one of them."""
WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Workload:
    """A load on a whole suite.

    Attributes:
        requests_per_s: arrivals a second.
        prompt_tokens: tokens of a prompt, on average.
        output_tokens: tokens of an answer, on average.
        streams: requests in progress at once.
    """

    requests_per_s: float
    prompt_tokens: float
    output_tokens: float
    streams: float


@dataclass(frozen=True, slots=True)
class TierCosts:
    """What the replicas of a tier use.

    Attributes:
        idle_cores: cores of a replica without requests.
        request_s: CPU seconds of a request, besides its tokens.
        prompt_token_s: CPU seconds of a token of a prompt.
        output_token_s: CPU seconds of a token of an answer.
        idle_bytes: resident memory of a replica without requests.
        stream_bytes: resident memory of a request in progress.
        error: largest error of the cores on loads that were not used to fit, as a share of what was measured.
        memory_error: the same of the memory.
    """

    idle_cores: float
    request_s: float
    prompt_token_s: float
    output_token_s: float
    idle_bytes: float
    stream_bytes: float
    error: float
    memory_error: float

    def busy_cores(self, work: Workload) -> float:
        """Returns the cores that a load keeps busy, besides those of idle replicas."""
        of_a_request = (
            self.request_s + work.prompt_tokens * self.prompt_token_s + work.output_tokens * self.output_token_s
        )
        return work.requests_per_s * of_a_request

    def cores(self, work: Workload, replicas: int = 1) -> float:
        """Returns the cores that a load keeps busy on a number of replicas."""
        return replicas * self.idle_cores + self.busy_cores(work)

    def memory_bytes(self, work: Workload, replicas: int = 1) -> float:
        """Returns the resident memory of all replicas."""
        return replicas * self.idle_bytes + work.streams * self.stream_bytes


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a model costs each tier, and how far that can be trusted.

    Attributes:
        error: largest error of the cores of all tiers together on loads that were not used to fit.
        max_streams: most requests in progress of the loads that were measured.
        max_prompt_tokens: longest prompt of the loads that were measured.
        max_output_tokens: longest answer of the loads that were measured.
    """

    tiers: Mapping[str, TierCosts]
    error: float
    max_streams: int
    max_prompt_tokens: float
    max_output_tokens: float

    def as_json(self) -> dict[str, Any]:
        """Returns what `read` reads."""
        return asdict(self)


def read(path: Path = FILE) -> Mapping[str, ModelCosts]:
    """Returns the measured costs by model.

    Raises:
        BadFlag: the file cannot be read, is not one of costs, or has no model.
    """
    try:
        models = json.loads(path.read_text("utf-8"))["models"]
        costs = {name: _model(document) for name, document in models.items()}
    except OSError as error:
        raise BadFlag(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadFlag(f"{path} is not a file of costs; benchmarks/costs.py writes one") from error
    if not costs:
        raise BadFlag(f"{path} has no samples of any model; measure one with benchmarks/costs.py")
    return costs


def _model(document: Mapping[str, Any]) -> ModelCosts:
    tiers = {name: TierCosts(**_numbers(TierCosts, tier)) for name, tier in document["tiers"].items()}
    if not tiers.keys() >= set(TIERS):
        raise ValueError("a tier is missing")
    numbers = _numbers(ModelCosts, document, without=("tiers",))
    return ModelCosts(
        tiers,
        numbers["error"],
        int(numbers["max_streams"]),
        numbers["max_prompt_tokens"],
        numbers["max_output_tokens"],
    )


def _numbers(kind: type[Any], document: Mapping[str, Any], without: tuple[str, ...] = ()) -> dict[str, float]:
    numbers = {one.name: float(document[one.name]) for one in fields(kind) if one.name not in without}
    if not all(math.isfinite(number) and number >= 0 for number in numbers.values()):
        raise ValueError("a cost is negative or not finite")
    return numbers
