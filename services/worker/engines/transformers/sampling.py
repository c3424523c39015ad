"""What one request asks of the sampler: unset options take the model's generation defaults, then plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.worker.contract.generation import GenerateRequest

EXACT = 1e-5
"""Below this a temperature is greedy: dividing by it would only lose precision."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Options with no None left.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is no limit.
        logprobs: alternatives per token; None: no log-probabilities at all.
        stop_ids: ids that end the request.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """The likeliest token is taken."""
        return self.temperature < EXACT

    @property
    def penalises(self) -> bool:
        """Tokens seen before count."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)

    @property
    def edits_logits(self) -> bool:
        """Some step changes logits before a token is chosen; a grammar comes on top."""
        return bool(
            self.penalises or self.logit_bias or self.allowed_token_ids or self.bad_words or self.min_tokens > 0
        )

    @property
    def narrows(self) -> bool:
        """Unlikely tokens are left out."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


def plan_of(request: GenerateRequest, defaults: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> SamplingPlan:
    """The plan of a request.

    Args:
        request: as the worker validated it.
        defaults: the model's generation_config.json.
        eos_token_ids: the model's; they end a request unless it ignores them.
    """
    sampling, stop = request.sampling, request.stop

    def chosen(name: str, plain: float) -> float:
        asked = getattr(sampling, name)
        value = defaults.get(name) if asked is None else asked
        return plain if value is None else float(value)

    ends = set(stop.stop_token_ids)
    if stop.ignore_eos:
        ends -= {*stop.eos_token_ids, *eos_token_ids}
    elif not ends:
        ends = {*stop.eos_token_ids, *eos_token_ids}
    if request.guided is not None:
        ends |= set(eos_token_ids)  # a grammar that is through leaves nothing else
    return SamplingPlan(
        temperature=chosen("temperature", 1.0),
        top_p=chosen("top_p", 1.0),
        top_k=max(0, int(chosen("top_k", 0))),
        min_p=chosen("min_p", 0.0),
        frequency_penalty=sampling.frequency_penalty or 0.0,
        presence_penalty=sampling.presence_penalty or 0.0,
        repetition_penalty=chosen("repetition_penalty", 1.0),
        seed=sampling.seed,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=sampling.bad_words,
        min_tokens=stop.min_tokens,
        stop_ids=tuple(sorted(ends)),
        logprobs=request.logprobs,
    )


class History:
    """Tokens of one request that penalties and bad words look back on.

    Args:
        prompt: ids of the prompt.
        resumed: how many of them, at the end, an earlier worker of the same request generated.
    """

    def __init__(self, prompt: list[int], resumed: int = 0) -> None:
        self.seen = set(prompt)
        self.counts: dict[int, int] = {}
        self.output: list[int] = []
        self.generated = 0
        for token_id in prompt[len(prompt) - resumed :]:
            self._count(token_id)

    def add(self, token_id: int) -> None:
        """One more generated token."""
        self.generated += 1
        self.seen.add(token_id)
        self._count(token_id)

    def _count(self, token_id: int) -> None:
        self.output.append(token_id)
        self.counts[token_id] = self.counts.get(token_id, 0) + 1

    def banned(self, bad_words: tuple[tuple[int, ...], ...]) -> set[int]:
        """Ids that would complete one of the sequences that must not come out."""
        return {
            word[-1]
            for word in bad_words
            if word and (len(word) == 1 or tuple(self.output[1 - len(word) :]) == word[:-1])
        }
