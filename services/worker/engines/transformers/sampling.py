"""Resolves a request's sampling options: its own, then the model's generation defaults, then neutral values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.worker.contract.generation import GenerateRequest

MIN_TEMPERATURE = 1e-5
"""Temperature that is divided by without losing precision; a lower one selects the most likely token."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Resolved sampling options of one request.

    Attributes:
        temperature: 0 samples greedily.
        top_k: 0 disables the limit.
        logprobs: Alternatives per token; None: log-probabilities not requested.
        stop_ids: Token ids that end the request.
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
        """Whether the most likely token is selected without sampling."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def penalises(self) -> bool:
        """Whether a repetition, frequency or presence penalty applies."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)

    @property
    def edits_logits(self) -> bool:
        """Whether any option changes logits before sampling; does not include grammars."""
        return bool(
            self.penalises or self.logit_bias or self.allowed_token_ids or self.bad_words or self.min_tokens > 0
        )

    @property
    def narrows(self) -> bool:
        """Whether top_p, top_k or min_p excludes tokens."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


def plan_of(request: GenerateRequest, defaults: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> SamplingPlan:
    """Returns the resolved sampling options of a validated request.

    Args:
        defaults: Contents of the model's generation_config.json.
        eos_token_ids: The model's end-of-sequence ids, which end a request unless it ignores them.
    """
    sampling, stop = request.sampling, request.stop

    def resolve(name: str, neutral: float) -> float:
        requested = getattr(sampling, name)
        value = defaults.get(name) if requested is None else requested
        return neutral if value is None else float(value)

    stop_ids = set(stop.stop_token_ids)
    if stop.ignore_eos:
        stop_ids -= {*stop.eos_token_ids, *eos_token_ids}
    elif not stop_ids:
        stop_ids = {*stop.eos_token_ids, *eos_token_ids}
    if request.guided is not None:
        stop_ids |= set(eos_token_ids)  # only these are allowed when the grammar is complete
    return SamplingPlan(
        temperature=resolve("temperature", 1.0),
        top_p=resolve("top_p", 1.0),
        top_k=max(0, int(resolve("top_k", 0))),
        min_p=resolve("min_p", 0.0),
        frequency_penalty=sampling.frequency_penalty or 0.0,
        presence_penalty=sampling.presence_penalty or 0.0,
        repetition_penalty=resolve("repetition_penalty", 1.0),
        seed=sampling.seed,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=sampling.bad_words,
        min_tokens=stop.min_tokens,
        stop_ids=tuple(sorted(stop_ids)),
        logprobs=request.logprobs,
    )


class History:
    """Tokens of one request to which penalties and bad words apply.

    Args:
        prompt: Token ids of the prompt.
        resumed: Number of trailing prompt tokens that another worker generated for the same request.
    """

    def __init__(self, prompt: list[int], resumed: int = 0) -> None:
        self.seen = set(prompt)
        self.counts: dict[int, int] = {}
        self.output: list[int] = []
        self.generated = 0
        for token_id in prompt[len(prompt) - resumed :]:
            self._count(token_id)

    def add(self, token_id: int) -> None:
        """Adds a generated token."""
        self.generated += 1
        self.seen.add(token_id)
        self._count(token_id)

    def _count(self, token_id: int) -> None:
        self.output.append(token_id)
        self.counts[token_id] = self.counts.get(token_id, 0) + 1

    def banned(self, bad_words: tuple[tuple[int, ...], ...]) -> set[int]:
        """Returns the ids that would complete one of the bad words."""
        return {
            word[-1]
            for word in bad_words
            if word and (len(word) == 1 or tuple(self.output[1 - len(word) :]) == word[:-1])
        }
