"""Fits what each tier costs to measured loads, by least squares of relative errors without negative costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from sluice.cli.sizing.costs import TIERS, WORKER, ModelCosts, TierCosts, Workload

MIN_LOADS = 4
"""Loads that a fit needs: one more than it has costs."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one load used.

    Attributes:
        held_back: whether it tests the fit instead of being part of it.
        cores: cores kept busy, by tier, the worker included.
        memory_bytes: most resident memory, by tier.
    """

    name: str
    held_back: bool
    work: Workload
    cores: Mapping[str, float]
    memory_bytes: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Idle:
    """What the tiers use without requests."""

    cores: Mapping[str, float]
    memory_bytes: Mapping[str, float]


def fit(idle: Idle, samples: Sequence[Sample]) -> ModelCosts:
    """Returns the costs that explain the samples best, with their errors on those held back.

    Raises:
        ValueError: fewer than `MIN_LOADS` samples to fit, or none held back.
    """
    known = [sample for sample in samples if not sample.held_back]
    held_back = [sample for sample in samples if sample.held_back]
    if len(known) < MIN_LOADS or not held_back:
        raise ValueError(f"A fit needs {MIN_LOADS} loads and one that is held back.")
    tiers = {name: _fit_tier(name, idle, known, held_back) for name in (*TIERS, WORKER)}
    works = [sample.work for sample in samples]
    return ModelCosts(
        tiers,
        error=max(abs(error) for error in errors(tiers, held_back).values()),
        max_streams=int(max(work.streams for work in works)),
        max_prompt_tokens=max(work.prompt_tokens for work in works),
        max_output_tokens=max(work.output_tokens for work in works),
    )


def kept(document: Mapping[str, Any]) -> tuple[Idle, list[Sample]]:
    """Returns what a model's costs were fitted to, from the document in which it is kept."""
    samples = [Sample(**{**load, "work": Workload(**load["work"])}) for load in document["loads"]]
    return Idle(**document["idle"]), samples


def errors(tiers: Mapping[str, TierCosts], samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the error of the cores of all tiers but the worker together, by load, as a share of the measured."""
    shares = {}
    for sample in samples:
        measured = sum(sample.cores[name] for name in TIERS)
        shares[sample.name] = sum(tiers[name].cores(sample.work) for name in TIERS) / measured - 1
    return shares


def tier_errors(costs: TierCosts, name: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Returns the error of the cores of one tier, by load, as a share of what was measured."""
    return {sample.name: costs.cores(sample.work) / sample.cores[name] - 1 for sample in samples}


def _fit_tier(name: str, idle: Idle, known: Sequence[Sample], held_back: Sequence[Sample]) -> TierCosts:
    rows, targets = [], []
    for sample in known:
        work, cores = sample.work, sample.cores[name]
        if cores <= 0:
            raise ValueError(f"{name} used no CPU time under {sample.name}: the load is too short to measure it.")
        of_a_request = (1.0, work.prompt_tokens, work.output_tokens)
        rows.append([work.requests_per_s * amount / cores for amount in of_a_request])
        targets.append(1 - min(idle.cores[name] / cores, 1.0))
    request_s, prompt_token_s, output_token_s = non_negative_least_squares(rows, targets)
    streams = [[sample.work.streams] for sample in known]
    grown = [max(sample.memory_bytes[name] - idle.memory_bytes[name], 0.0) for sample in known]
    (stream_bytes,) = non_negative_least_squares(streams, grown)
    costs = TierCosts(
        idle.cores[name], request_s, prompt_token_s, output_token_s, idle.memory_bytes[name], stream_bytes, 0.0, 0.0
    )
    error = max(abs(share) for share in tier_errors(costs, name, held_back).values())
    memory_error = max(abs(costs.memory_bytes(sample.work) / sample.memory_bytes[name] - 1) for sample in held_back)
    return replace(costs, error=error, memory_error=memory_error)


def non_negative_least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> tuple[float, ...]:
    """Returns the factors of at least 0 whose products with the rows come closest to the targets.

    The closest ones have some factors at 0 and the others unbounded, so all choices are tried: meant for few factors.
    """
    width = len(rows[0])
    best, least = (0.0,) * width, sum(target * target for target in targets)
    for size in range(1, width + 1):
        for chosen in combinations(range(width), size):
            factors = _least_squares([[row[column] for column in chosen] for row in rows], targets)
            if factors is None or min(factors) < 0:
                continue
            whole = [0.0] * width
            for column, factor in zip(chosen, factors, strict=True):
                whole[column] = factor
            residue = sum(
                (sum(amount * factor for amount, factor in zip(row, whole, strict=True)) - target) ** 2
                for row, target in zip(rows, targets, strict=True)
            )
            if residue < least:
                best, least = tuple(whole), residue
    return best


def _least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float] | None:
    """Solves the normal equations, with columns scaled alike; None if the columns depend on each other."""
    width = len(rows[0])
    scales = [max(abs(row[column]) for row in rows) or 1.0 for column in range(width)]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(width)]
        + [sum(row[i] * target for row, target in zip(scaled, targets, strict=True))]
        for i in range(width)
    ]
    for column in range(width):
        pivot = max(range(column, width), key=lambda at: abs(matrix[at][column]))
        if abs(matrix[pivot][column]) < 1e-12:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for at in range(width):
            if at != column:
                factor = matrix[at][column] / matrix[column][column]
                matrix[at] = [one - factor * other for one, other in zip(matrix[at], matrix[column], strict=True)]
    return [matrix[column][width] / matrix[column][column] / scales[column] for column in range(width)]
