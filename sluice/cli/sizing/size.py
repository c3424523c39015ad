"""`sluice size`: the cores, memory and replicas of each tier that a load needs, and how many workers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sluice.cli.errors import BadFlag
from sluice.cli.sizing.costs import TIERS, ModelCosts, Workload, read

SINGLE = "redis"
"""The tier of one process, which serves a model with one core."""
MIB = 1 << 20
MAX_REPLICAS = 100_000
"""Replicas of a tier; a load that needs more is refused."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a suite is sized for; all but `worker_tokens_per_s` are positive.

    Attributes:
        prompt: tokens of a prompt, on average.
        output: tokens of an answer, on average.
        ttft_s: seconds to the first token; with `inter_token_ms`, it says how long a request is in progress.
        utilization: share of a core, or of what a worker generates at most, that the load may use on average.
        worker_tokens_per_s: output tokens a second of one worker, as measured; 0: unknown.
    """

    requests_per_s: float
    prompt: float
    output: float
    model: str
    ttft_s: float = 1.0
    inter_token_ms: float = 20.0
    utilization: float = 0.7
    worker_tokens_per_s: float = 0.0

    def work(self) -> Workload:
        """Returns the load; raises BadFlag for a number that is no load."""
        for name in ("requests_per_s", "prompt", "output", "ttft_s", "inter_token_ms", "utilization"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise BadFlag(f"--{name.replace('_', '-')} is {value:g}; it must be a number above 0")
        if self.utilization > 1:
            raise BadFlag(f"--utilization is {self.utilization:g}; it must be a share of at most 1, such as 0.7")
        if not (math.isfinite(self.worker_tokens_per_s) and self.worker_tokens_per_s >= 0):
            raise BadFlag(f"--worker-tokens-per-s is {self.worker_tokens_per_s:g}; it must be a number above 0")
        seconds = self.ttft_s + self.output * self.inter_token_ms / 1e3
        return Workload(self.requests_per_s, self.prompt, self.output, self.requests_per_s * seconds)


@dataclass(frozen=True, slots=True)
class TierSize:
    """What a tier needs: `cores` and `memory_bytes` of all replicas together, as used on average."""

    replicas: int
    cores: float
    memory_bytes: float
    error: float
    memory_error: float


@dataclass(frozen=True, slots=True)
class Size:
    """What a load needs.

    Attributes:
        error: largest error of all cores together on loads that were not used to fit the costs.
        workers: None if their speed was not given.
        notes: sentences about what the numbers do not say.
    """

    model: str
    work: Workload
    tiers: Mapping[str, TierSize]
    error: float
    workers: int | None
    notes: tuple[str, ...]

    @property
    def cores(self) -> float:
        """Cores used by all tiers but the workers."""
        return sum(tier.cores for tier in self.tiers.values())

    def as_json(self) -> dict[str, Any]:
        """Returns the answer for scripts."""
        return {**asdict(self), "cores": self.cores}


def size(question: Question, models: Mapping[str, ModelCosts]) -> Size:
    """Returns what a load needs.

    Raises:
        BadFlag: the load is none, or the model was not measured.
    """
    work = question.work()
    costs = models.get(question.model)
    if costs is None:
        raise BadFlag(
            f"--model {question.model} was not measured; choose from {', '.join(sorted(models))}, or measure it with "
            "benchmarks/costs.py and pass its file with --costs"
        )
    tiers = {name: _tier(name, costs, work, question.utilization) for name in TIERS}
    workers = None
    if question.worker_tokens_per_s:
        share = work.requests_per_s * work.output_tokens / question.worker_tokens_per_s
        workers = max(math.ceil(round(share / question.utilization, 6)), 1)
    return Size(question.model, work, tiers, costs.error, workers, tuple(_notes(costs, work, tiers, question)))


def _tier(name: str, costs: ModelCosts, work: Workload, utilization: float) -> TierSize:
    tier = costs.tiers[name]
    free = utilization - tier.idle_cores
    if free <= 0:
        raise BadFlag(f"--utilization is {utilization:g}; a {name} without requests uses {tier.idle_cores:.3f} cores")
    wanted = tier.busy_cores(work) / free
    if wanted > MAX_REPLICAS:
        raise BadFlag(f"The load needs more than {MAX_REPLICAS:,} replicas of {name}; check --requests-per-s")
    replicas = 1 if name == SINGLE else max(math.ceil(round(wanted, 6)), 1)
    cores, memory = tier.cores(work, replicas), tier.memory_bytes(work, replicas)
    return TierSize(replicas, cores, memory, tier.error, tier.memory_error)


def _notes(costs: ModelCosts, work: Workload, tiers: Mapping[str, TierSize], question: Question) -> Iterator[str]:
    if work.prompt_tokens > costs.max_prompt_tokens:
        yield f"Prompts were measured up to {costs.max_prompt_tokens:,.0f} tokens; this is extrapolated."
    if work.output_tokens > costs.max_output_tokens:
        yield f"Answers were measured up to {costs.max_output_tokens:,.0f} tokens; this is extrapolated."
    streams = work.streams / min(tiers[name].replicas for name in TIERS if name != SINGLE)
    if streams > costs.max_streams:
        yield (
            f"A replica has up to {streams:,.0f} requests in progress, and at most {costs.max_streams} were measured; "
            "with more of them a token costs less, so the cores are an upper bound."
        )
    if tiers[SINGLE].cores > question.utilization:
        yield (
            f"Redis needs {tiers[SINGLE].cores:.1f} cores, and one model has one: divide the load into several suites, "
            "or models over a cluster."
        )


def run(question: Question, path: Path | None, as_json: bool, console: Console) -> int:
    """Prints what a load needs; returns exit code 0.

    Args:
        path: the file of costs; None: those measured with this version.

    Raises:
        BadFlag: the load is none, the model was not measured, or the file is none of costs.
    """
    answer = size(question, read() if path is None else read(path))
    if as_json:
        print(json.dumps(answer.as_json()))
        return 0
    work = answer.work
    console.print(
        f"{work.requests_per_s:g} requests/s with {work.prompt_tokens:g} prompt and {work.output_tokens:g} output "
        f"tokens, about {work.streams:,.0f} in progress"
    )
    console.print(_table(answer))
    console.print(f"All tiers: {answer.cores:.2f} cores, ±{answer.error:.0%} on loads not used to fit the costs.")
    if answer.workers is None:
        console.print("Workers: pass --worker-tokens-per-s, the output tokens a second that one of yours generates.")
    else:
        console.print(
            f"Workers: {answer.workers}, at {question.utilization:.0%} of {question.worker_tokens_per_s:g} tokens/s."
        )
    for note in answer.notes:
        console.print(note)
    return 0


def _table(answer: Size) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("tier", no_wrap=True)
    for title in ("replicas", "cores", "error", "MiB", "error", "MiB a replica"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, tier in answer.tiers.items():
        mib = tier.memory_bytes / MIB
        cores, memory = (f"{tier.cores:.2f}", f"±{tier.error:.0%}"), (f"{mib:,.0f}", f"±{tier.memory_error:.0%}")
        table.add_row(name, str(tier.replicas), *cores, *memory, f"{mib / tier.replicas:,.0f}")
    return table
