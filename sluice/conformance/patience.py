"""The deadlines of the kit, which can be scaled for slow machines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """Deadlines in seconds.

    Attributes:
        answer_s: a unary call without computation.
        generation_s: a generation of a few dozen tokens, concurrently with others.
        cancel_s: from a cancellation to the terminal delta.
        settle_s: until the engine's load reflects the end of a request, or an event arrives.
        attach_s: until the worker registers with the kit as its router.
        rule_s: one rule in total.
    """

    answer_s: float = 10.0
    generation_s: float = 60.0
    cancel_s: float = 2.0
    settle_s: float = 10.0
    attach_s: float = 15.0
    rule_s: float = 180.0

    def times(self, factor: float) -> Patience:
        """Returns deadlines multiplied by `factor`."""
        return Patience(
            answer_s=self.answer_s * factor,
            generation_s=self.generation_s * factor,
            cancel_s=self.cancel_s * factor,
            settle_s=self.settle_s * factor,
            attach_s=self.attach_s * factor,
            rule_s=self.rule_s * factor,
        )
