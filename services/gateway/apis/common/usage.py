"""The token usage of the generations behind one response."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.pipeline.pipeline import Generation


@dataclass(frozen=True, slots=True)
class Counts:
    """Token counts of a response; `cached` is included in `prompt` and `reasoning` in `generated`."""

    prompt: int = 0
    generated: int = 0
    cached: int = 0
    reasoning: int = 0


class GenerationUsage:
    """Sums the token counts of generations.

    Args:
        prompt_only: do not count generated tokens.
    """

    def __init__(self, prompt_only: bool = False) -> None:
        self.generations: list[Generation] = []
        self._prompt_only = prompt_only

    def counts(self) -> Counts:
        """Returns the counts so far, over all generations."""
        generations = self.generations
        return Counts(
            sum(generation.prompt_tokens for generation in generations),
            0 if self._prompt_only else sum(generation.completion_tokens for generation in generations),
            sum(generation.cached_tokens for generation in generations),
            sum(generation.reasoning_tokens for generation in generations),
        )

    def prompt_tokens(self, choice: int) -> int:
        """Returns the prompt tokens of the generation that a choice belongs to."""
        for generation in self.generations:
            if choice < len(generation.streams):
                return generation.prompt_tokens
            choice -= len(generation.streams)
        return 0

    def cancel(self) -> None:
        """Cancels all generations."""
        for generation in self.generations:
            generation.cancel()
