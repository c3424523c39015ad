"""Chooses the next token of every request in a batch, each by its own options.

Needs torch; everything here runs in the engine's step thread. Requests without options of their own cost nothing beyond
one argmax over the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from services.worker.contract.generation import PositionLogprobs, TokenLogprob
from services.worker.engines.transformers.guidance import Constraint
from services.worker.engines.transformers.sampling import History, SamplingPlan

NEVER = float("-inf")


class TokenSampler:
    """One request's part in the sampling of its batches.

    Args:
        plan: what it asks for.
        history: of its tokens.
        constraint: of its output, if any.
        device: where the logits are.
    """

    def __init__(self, plan: SamplingPlan, history: History, constraint: Constraint | None, device: Any) -> None:
        self.plan = plan
        self.history = history
        self.constraint = constraint
        self.generator: torch.Generator | None = None
        if plan.seed is not None and not plan.greedy:
            self.generator = torch.Generator(device=device)
            self.generator.manual_seed(plan.seed % (1 << 63))
        self._remembers = plan.penalises or bool(plan.bad_words)

    @property
    def edits(self) -> bool:
        """Its row of logits has to be changed before a token is chosen."""
        return self.plan.edits_logits or self.constraint is not None

    def took(self, token_id: int) -> None:
        """The token that was chosen."""
        if self._remembers:
            self.history.add(token_id)
        else:
            self.history.generated += 1
        if self.constraint is not None:
            self.constraint.took(token_id)

    def edit(self, row: Tensor) -> None:
        """Changes a row of logits [vocabulary] in place."""
        plan, history = self.plan, self.history
        if plan.allowed_token_ids:
            kept = _ids(plan.allowed_token_ids, row)
            values = row[kept]
            row.fill_(NEVER)
            row[kept] = values
        if plan.logit_bias:
            row[_ids(tuple(plan.logit_bias), row)] += torch.tensor(list(plan.logit_bias.values()), device=row.device)
        if plan.penalises:
            _penalise(row, plan, history)
        banned = history.banned(plan.bad_words) if plan.bad_words else set()
        if history.generated < plan.min_tokens and self.constraint is None:
            banned.update(plan.stop_ids)
        if banned:
            row[_ids(tuple(banned), row)] = NEVER
        if self.constraint is not None:
            self.constraint.mask(row)


def choose(
    logits: Tensor, choosers: Sequence[TokenSampler]
) -> tuple[Tensor, list[int], list[PositionLogprobs | None] | None]:
    """The next token of each request.

    Args:
        logits: [requests, vocabulary], float32; may be changed.
        choosers: one per row.

    Returns:
        The ids as a tensor and as a list, and what log-probabilities were asked for (of the logits before options).
    """
    wanted = [sampler.plan.logprobs for sampler in choosers]
    raw = torch.log_softmax(logits, dim=-1) if any(one is not None for one in wanted) else None
    for row, sampler in zip(logits, choosers, strict=True):
        if sampler.edits:
            sampler.edit(row)
    tokens = logits.argmax(dim=-1)
    random = [index for index, sampler in enumerate(choosers) if not sampler.plan.greedy]
    if random:
        rows = torch.tensor(random, device=logits.device)
        tokens[rows] = _draw(logits[rows], [choosers[index] for index in random])
    ids: list[int] = tokens.tolist()
    for token_id, sampler in zip(ids, choosers, strict=True):
        sampler.took(token_id)
    return tokens, ids, None if raw is None else _logprobs(raw, ids, wanted)


def position_logprobs(row: Tensor, token_id: int, alternatives: int) -> PositionLogprobs:
    """What a row of log-probabilities [vocabulary] says of one token and its likeliest alternatives."""
    chosen = row[token_id]
    rank = int((row > chosen).sum()) + 1
    values, indices = row.topk(min(alternatives, row.numel()))
    top = tuple(
        TokenLogprob(index, value, place)
        for place, (index, value) in enumerate(zip(indices.tolist(), values.tolist(), strict=True), 1)
    )
    return PositionLogprobs(TokenLogprob(token_id, float(chosen), rank), top)


def _logprobs(raw: Tensor, ids: Sequence[int], wanted: Sequence[int | None]) -> list[PositionLogprobs | None]:
    return [
        None if count is None else position_logprobs(raw[index], ids[index], count)
        for index, count in enumerate(wanted)
    ]


def _draw(logits: Tensor, choosers: Sequence[TokenSampler]) -> Tensor:
    """Samples a token per row; exponential noise makes the draw of a row independent of the batch it is in."""
    plans = [sampler.plan for sampler in choosers]
    logits = logits / _column([plan.temperature for plan in plans], logits)
    if any(plan.narrows for plan in plans):
        logits = _narrow(logits, plans)
    noise = torch.empty_like(logits).exponential_()
    for index, sampler in enumerate(choosers):
        if sampler.generator is not None:
            noise[index].exponential_(generator=sampler.generator)
    return torch.softmax(logits, dim=-1).div_(noise.clamp_min_(1e-30)).argmax(dim=-1)


def _narrow(logits: Tensor, plans: Sequence[SamplingPlan]) -> Tensor:
    """Leaves out what min_p, top_k and top_p leave out; the likeliest token always stays."""
    width = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = torch.softmax(ordered, dim=-1)
    drop = probabilities < probabilities[:, :1] * _column([plan.min_p for plan in plans], logits)
    places = torch.arange(width, device=logits.device)
    limits = [min(plan.top_k, width) if plan.top_k else width for plan in plans]
    drop |= places >= _column(limits, logits)
    kept = torch.softmax(ordered.masked_fill(drop, NEVER), dim=-1)
    before = kept.cumsum(dim=-1) - kept
    top_p = _column([plan.top_p for plan in plans], logits)
    drop |= (before >= top_p) & (top_p < 1.0)
    drop[:, 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), NEVER)


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
