"""Samples the next token of every request in a batch, each with its own options.

Runs in the batching thread. Requests without sampling options cost only one argmax over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from services.worker.contract.generation import PositionLogprobs, TokenLogprob
from services.worker.engines.transformers.guidance import Constraint
from services.worker.engines.transformers.sampling import History, SamplingPlan
from services.worker.engines.transformers.step_errors import is_device_lost

NEGATIVE_INFINITY = float("-inf")

T = TypeVar("T")


class TokenSampler:
    """Sampling state of one request.

    Args:
        plan: The request's sampling options.
        history: The request's tokens.
        constraint: The constraint on its output, if any.
        device: Device of the logits.

    Attributes:
        error: What the request raised in a step; its row is ignored from then on.
    """

    def __init__(self, plan: SamplingPlan, history: History, constraint: Constraint | None, device: Any) -> None:
        self.plan = plan
        self.history = history
        self.constraint = constraint
        self.error: Exception | None = None
        self.generator: torch.Generator | None = None
        if plan.seed is not None and not plan.greedy:
            self.generator = torch.Generator(device=device)
            self.generator.manual_seed(plan.seed % (1 << 63))
        self._tracks_history = plan.penalises or bool(plan.bad_words)

    @property
    def edits(self) -> bool:
        """Whether the request's logits change before sampling."""
        return self.plan.edits_logits or self.constraint is not None

    def attempt(self, work: Callable[[], T], otherwise: T) -> T:
        """Runs a part of this request's step; an exception is kept in `error` and ends only this request."""
        try:
            return work()
        except Exception as error:
            if is_device_lost(error):
                raise
            self.error = self.error or error
            return otherwise

    def record(self, token_id: int) -> None:
        """Records a sampled token."""
        if self._tracks_history:
            self.history.add(token_id)
        else:
            self.history.generated += 1
        if self.constraint is not None:
            self.constraint.accept(token_id)

    def edit(self, row: Tensor) -> None:
        """Applies penalties, biases and masks to a row of logits [vocabulary], in place."""
        plan, history = self.plan, self.history
        if plan.allowed_token_ids:
            allowed = _ids(plan.allowed_token_ids, row)
            values = row[allowed]
            row.fill_(NEGATIVE_INFINITY)
            row[allowed] = values
        if plan.logit_bias:
            row[_ids(tuple(plan.logit_bias), row)] += torch.tensor(list(plan.logit_bias.values()), device=row.device)
        if plan.penalises:
            _penalise(row, plan, history)
        banned = history.banned(plan.bad_words) if plan.bad_words else set()
        if history.generated < plan.min_tokens and self.constraint is None:
            banned.update(plan.stop_ids)
        if banned:
            row[_ids(tuple(banned), row)] = NEGATIVE_INFINITY
        if self.constraint is not None:
            self.constraint.mask(row)


def choose(
    logits: Tensor, samplers: Sequence[TokenSampler]
) -> tuple[Tensor, list[int], list[PositionLogprobs | None] | None]:
    """Samples the next token of each request.

    Args:
        logits: [requests, vocabulary], float32; modified in place.
        samplers: One per row.

    Returns:
        The ids as a tensor and as a list, and the requested log-probabilities, computed before any sampling options.
        The row of a request that raised has any id; its sampler has the error.
    """
    alternatives = [sampler.plan.logprobs for sampler in samplers]
    raw = torch.log_softmax(logits, dim=-1) if any(count is not None for count in alternatives) else None
    for row, sampler in zip(logits, samplers, strict=True):
        if sampler.edits:
            sampler.attempt(partial(sampler.edit, row), None)
    tokens = logits.argmax(dim=-1)
    random = [index for index, sampler in enumerate(samplers) if not sampler.plan.greedy and sampler.error is None]
    if random:
        rows = torch.tensor(random, device=logits.device)
        tokens[rows] = _drawn(logits[rows], [samplers[index] for index in random])
    ids: list[int] = tokens.tolist()
    for token_id, sampler in zip(ids, samplers, strict=True):
        if sampler.error is None:
            sampler.attempt(partial(sampler.record, token_id), None)
    return tokens, ids, None if raw is None else _logprobs(raw, ids, samplers)


def position_logprobs(row: Tensor, token_id: int, alternatives: int) -> PositionLogprobs:
    """Returns the log-probability of one token and the most likely alternatives, from a row [vocabulary]."""
    chosen = row[token_id]
    rank = int((row > chosen).sum()) + 1
    values, indices = row.topk(min(alternatives, row.numel()))
    top = tuple(
        TokenLogprob(index, value, position)
        for position, (index, value) in enumerate(zip(indices.tolist(), values.tolist(), strict=True), 1)
    )
    return PositionLogprobs(TokenLogprob(token_id, float(chosen), rank), top)


def _logprobs(raw: Tensor, ids: Sequence[int], samplers: Sequence[TokenSampler]) -> list[PositionLogprobs | None]:
    return [
        None
        if (count := sampler.plan.logprobs) is None or sampler.error is not None
        else sampler.attempt(partial(position_logprobs, raw[index], ids[index], count), None)
        for index, sampler in enumerate(samplers)
    ]


def _drawn(logits: Tensor, samplers: Sequence[TokenSampler]) -> Tensor:
    """Samples a token per row, row by row where that fails for all together."""
    try:
        return _draw(logits, samplers)
    except Exception as error:
        if is_device_lost(error):
            raise
    none = torch.zeros(1, dtype=torch.long, device=logits.device)
    rows = zip(logits.split(1), samplers, strict=True)
    return torch.cat([sampler.attempt(partial(_draw, row, [sampler]), none) for row, sampler in rows])


def _draw(logits: Tensor, samplers: Sequence[TokenSampler]) -> Tensor:
    """Samples a token per row; exponential noise makes a row's sample independent of the rest of the batch."""
    plans = [sampler.plan for sampler in samplers]
    logits = logits / _column([plan.temperature for plan in plans], logits)
    if any(plan.narrows for plan in plans):
        logits = _narrow(logits, plans)
    noise = torch.empty_like(logits).exponential_()
    for index, sampler in enumerate(samplers):
        if sampler.generator is not None:
            sampler.attempt(partial(noise[index].exponential_, generator=sampler.generator), None)
    return torch.softmax(logits, dim=-1).div_(noise.clamp_min_(1e-30)).argmax(dim=-1)


def _narrow(logits: Tensor, plans: Sequence[SamplingPlan]) -> Tensor:
    """Applies min_p, top_k and top_p; the most likely token always remains."""
    width = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = torch.softmax(ordered, dim=-1)
    drop = probabilities < probabilities[:, :1] * _column([plan.min_p for plan in plans], logits)
    positions = torch.arange(width, device=logits.device)
    limits = [min(plan.top_k, width) if plan.top_k else width for plan in plans]
    drop |= positions >= _column(limits, logits)
    kept = torch.softmax(ordered.masked_fill(drop, NEGATIVE_INFINITY), dim=-1)
    before = kept.cumsum(dim=-1) - kept
    top_p = _column([plan.top_p for plan in plans], logits)
    drop |= (before >= top_p) & (top_p < 1.0)
    drop[:, 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), NEGATIVE_INFINITY)


def _penalise(row: Tensor, plan: SamplingPlan, history: History) -> None:
    if plan.repetition_penalty != 1.0 and history.seen:
        ids = _ids(tuple(history.seen), row)
        values = row[ids]
        row[ids] = torch.where(values > 0, values / plan.repetition_penalty, values * plan.repetition_penalty)
    if history.counts and (plan.frequency_penalty or plan.presence_penalty):
        counts = torch.tensor(list(history.counts.values()), dtype=row.dtype, device=row.device)
        row[_ids(tuple(history.counts), row)] -= counts * plan.frequency_penalty + plan.presence_penalty


def _ids(ids: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor(ids, dtype=torch.long, device=like.device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)
